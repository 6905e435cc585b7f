/* Decodes plain JPEGs into rows of a batch: many in one call, without Python's GIL.
 *
 * libjpeg-turbo returns the planes as they are stored (luma at full size, chroma usually at half the size). Only the
 * part that is shown is processed: rows below it are not decoded, rows above it are only entropy-decoded. Pillow's
 * antialiased triangle filter resizes each plane to the target, and the result is converted to RGB. So chroma is
 * neither enlarged nor converted at the size of the file.
 *
 * A file that is damaged or unusual gets a status, and the caller decodes it with Pillow: any error or warning of
 * libjpeg ends the picture. Prints nothing, keeps no state between calls, and writes to `out` only after all the data
 * that is needed has been decoded.
 */

#include <limits.h>
#include <math.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>

#ifndef LIBJPEG_TURBO_VERSION_NUMBER
#error "this needs libjpeg-turbo"
#endif

#if JPEG_LIB_VERSION >= 70
#define BLOCK_WIDTH(part) ((part)->DCT_h_scaled_size)
#define BLOCK_HEIGHT(part) ((part)->DCT_v_scaled_size)
#define PICTURE_BLOCK(info) ((info)->min_DCT_h_scaled_size)
#else
#define BLOCK_WIDTH(part) ((part)->DCT_scaled_size)
#define BLOCK_HEIGHT(part) ((part)->DCT_scaled_size)
#define PICTURE_BLOCK(info) ((info)->min_DCT_scaled_size)
#endif

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define WITH_AVX2 1
#include <immintrin.h>
#else
#define WITH_AVX2 0
#endif

#define TEXT(tokens) #tokens
#define VERSION_TEXT(version) TEXT(version)
#define INLINE static inline __attribute__((always_inline))
#define AVX2 __attribute__((target("avx2")))
#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

enum { DONE = 0, USE_PILLOW = 1, NO_MEMORY = 2 };
enum { PLAIN = 0, WITH_METADATA = 1, NOT_PLAIN = 2 };

/* The vector code reads and writes rows in blocks: bytes allocated after each row. */
#define ROW_PADDING 64
#define MAX_TAPS 256
/* The weights of a pixel add up to ONE, which stands for 1.0. */
#define ONE_BITS 14
#define ONE (1 << ONE_BITS)
/* A larger plane is freed after its picture, a smaller one is reused within the call. */
#define MAX_REUSED_BYTES ((size_t)64 << 20)
#define MAX_SIDE 65500

/* One picture. `_PICTURE` in native_jpeg.py has the same layout; NativeDecoder compares the sizes. */
typedef struct {
    const uint8_t *data;
    uint64_t size;
    uint8_t *out;        /* [out_height][out_width][3] */
    double box[4];       /* left, upper, right, lower, in stored pixels of the file */
    int32_t width;       /* of the file, as stored and as aiofeed_headers found it */
    int32_t height;
    int32_t out_width;   /* upright */
    int32_t out_height;
    int32_t factor;      /* 1, 2, 4 or 8: decoded at 1 / factor */
    int32_t orientation; /* EXIF's, 1 to 8 */
    int32_t flip;        /* mirror the upright picture left to right */
    int32_t status;      /* output */
} picture_t;

/* Resamples one axis of a plane: for each target pixel its first source pixel, and weights. */
typedef struct {
    double start, end, widest;
    int limit, count, columns; /* arguments of prepare_axis */
    int valid;
    int taps, step;            /* most weights of a pixel; weights stored per pixel */
    int lowest, highest;       /* source pixels are in [lowest, highest) */
    int shuffled;              /* the sources of 16 / step pixels lie within 16 bytes; `masks` selects them */
    int *first;
    int *used;
    int16_t *weights;
    uint8_t *masks;
    size_t capacity;
} axis_t;

typedef struct {
    uint8_t *memory;
    size_t capacity;
    size_t stride;
    int wide, high;  /* size in pixels, padding excluded */
    int first;       /* row of the plane at the start of `memory` */
    axis_t *across, *down;
} plane_t;

typedef struct {
    struct jpeg_error_mgr errors; /* first member: libjpeg passes a pointer to it */
    jmp_buf jump;
    struct jpeg_decompress_struct info;
    plane_t planes[3];
    axis_t axes[4]; /* across and down of luma, then of chroma */
    uint8_t *lines; /* memory of lines_t */
    size_t lines_capacity;
} work_t;

/* --- libjpeg's errors and warnings */

static void on_error(j_common_ptr info) {
    longjmp(((work_t *)info->err)->jump, 1);
}

static void on_message(j_common_ptr info, int level) {
    if (level < 0) longjmp(((work_t *)info->err)->jump, 1); /* a warning: Pillow decodes the file */
}

static void on_output(j_common_ptr info) {
    (void)info;
}

/* --- memory */

static int reserve(void **memory, size_t *capacity, size_t wanted) {
    if (wanted <= *capacity) return 1;
    free(*memory);
    *capacity = 0;
    *memory = calloc(1, wanted); /* weights of 0 multiply these bytes: they must be initialised */
    if (*memory == NULL) return 0;
    *capacity = wanted;
    return 1;
}

#define DOUBLED (-1.0)

/* --- weights: Pillow's precompute_coeffs for a triangle, as integers that add up to ONE */

/* Shuffle masks that pair 16 source bytes with the weights of 16 / step pixels. */
static void prepare_masks(axis_t *axis, int count) {
    const int step = axis->step, group = 16 / step;
    axis->shuffled = 1;
    for (int at = 0; at < count; at++) {
        const int offset = axis->first[at] - axis->first[at / group * group];
        if (offset + axis->used[at] > 16) axis->shuffled = 0;
        for (int k = 0; k < step; k++)
            axis->masks[(size_t)at * step + k] = (uint8_t)(offset + k > 15 ? 15 : offset + k);
    }
}

/* The weight of a chroma pixel where Pillow enlarges a picture: libjpeg first doubles chroma (3/4 of the nearest pixel
 * and 1/4 of the next), then Pillow mixes two pixels of the size of the file. */
static double doubled_weight(int k, double center, int limit) {
    const double place = 2 * center - 0.5, left = floor(place);
    double sum = 0;
    for (int side = 0; side < 2; side++) {
        const int pixel = (int)fmin(fmax(left + side, 0), 2.0 * limit - 1);
        const int next = pixel / 2 + (pixel % 2 ? 1 : -1);
        const double share = side ? place - left : 1 - (place - left);
        if (k == pixel / 2) sum += 0.75 * share;
        if (k == (next < 0 ? 0 : next < limit ? next : limit - 1)) sum += 0.25 * share;
    }
    return sum;
}

static void prepare_weights(axis_t *axis, int at, double center, double reach, int most_taps) {
    double weights[MAX_TAPS];
    int low = center - reach + 0.5 < 0 ? 0 : (int)(center - reach + 0.5), high = (int)(center + reach + 0.5);
    if (low >= axis->limit) low = axis->limit - 1;
    if (high > axis->limit) high = axis->limit;
    if (high > low + most_taps) high = low + most_taps;
    if (high <= low) high = low + 1;
    double total = 0;
    const double slope = 1.0 / reach;
    for (int k = low; k < high; k++) {
        double weight = axis->widest < 0 ? doubled_weight(k, center, axis->limit) : 1.0 - fabs((k - center + 0.5) * slope);
        weights[k - low] = weight > 0 ? weight : 0;
        total += weights[k - low];
    }
    if (!(total > 0)) weights[0] = total = 1;
    const double factor = ONE / total;
    int16_t *integers = axis->weights + (size_t)at * axis->step;
    int sum = 0, largest = 0, used = 1;
    for (int k = 0; k < high - low; k++) {
        const int value = (int)(weights[k] * factor + 0.5);
        integers[k] = (int16_t)value;
        sum += value;
        if (integers[k] > integers[largest]) largest = k;
        if (value) used = k + 1;
    }
    integers[largest] = (int16_t)(integers[largest] + ONE - sum);
    axis->first[at] = low;
    axis->used[at] = used;
    if (used > axis->taps) axis->taps = used;
    if (low < axis->lowest) axis->lowest = low;
    if (low + used > axis->highest) axis->highest = low + used;
}

static int prepare_axis(axis_t *axis, double start, double end, double widest, int limit, int count, int columns) {
    if (axis->valid && axis->start == start && axis->end == end && axis->widest == widest && axis->limit == limit &&
        axis->count == count && axis->columns == columns)
        return 1;
    const double scale = (end - start) / count;
    const double reach = widest < 0 ? 1.5 : fmax(fmax(scale, 1.0), widest);
    if (!(start >= 0 && start < end && end <= limit && reach < MAX_TAPS / 2 - 2)) return 0;
    const int most_taps = (int)(2 * reach) + 1;
    const int step = !columns ? most_taps : most_taps <= 4 ? 4 : (most_taps + 7) / 8 * 8;
    const size_t padded = ((size_t)count + 7) / 8 * 8; /* the vector code computes eight pixels at a time */
    const size_t wanted = padded * (2 * sizeof(int) + (size_t)step * (sizeof(int16_t) + 1));
    axis->valid = 0;
    void *memory = axis->first;
    const int reserved = reserve(&memory, &axis->capacity, wanted);
    axis->first = memory;
    if (!reserved) return 0;
    memset(memory, 0, wanted);
    axis->used = axis->first + padded;
    axis->weights = (int16_t *)(axis->used + padded);
    axis->masks = (uint8_t *)(axis->weights + padded * (size_t)step);
    axis->start = start, axis->end = end, axis->widest = widest;
    axis->limit = limit, axis->count = count, axis->columns = columns, axis->step = step;
    axis->lowest = limit, axis->highest = 0, axis->taps = 1, axis->shuffled = 0;
    for (int at = 0; at < count; at++) prepare_weights(axis, at, start + (at + 0.5) * scale, reach, most_taps);
    for (size_t at = (size_t)count; at < padded; at++) axis->first[at] = axis->first[count - 1];
    if (columns && step <= 8) prepare_masks(axis, (int)padded);
    axis->valid = 1;
    return 1;
}

/* --- pixels, portable */

static void mix_rows(const plane_t *plane, int at, uint8_t *line) {
    const axis_t *down = plane->down;
    const int16_t *weights = down->weights + (size_t)at * down->step;
    const int used = down->used[at], from = plane->across->lowest, to = plane->across->highest;
    const uint8_t *top = plane->memory + (size_t)(down->first[at] - plane->first) * plane->stride;
    for (int x = from; x < to; x++) {
        int sum = ONE / 2;
        for (int k = 0; k < used; k++) sum += top[(size_t)k * plane->stride + x] * weights[k];
        line[x] = (uint8_t)(sum / ONE); /* weights are at least 0 and add up to ONE: at most 255 */
    }
}

static void mix_columns(const axis_t *across, const uint8_t *line, uint8_t *to) {
    for (int x = 0; x < across->count; x++) {
        const int16_t *weights = across->weights + (size_t)x * across->step;
        const uint8_t *from = line + across->first[x];
        int sum = ONE / 2;
        for (int k = 0; k < across->used[x]; k++) sum += from[k] * weights[k];
        to[x] = (uint8_t)(sum / ONE);
    }
}

INLINE uint8_t clamp(int value) {
    return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

/* ITU T.871, section 7, in libjpeg's fixed point. */
INLINE void pixel_to_rgb(int y, int u, int v, uint8_t *rgb) {
    rgb[0] = clamp(y + ((91881 * v + 32768) >> 16));
    rgb[1] = clamp(y + ((-22554 * u - 46802 * v + 32768) >> 16));
    rgb[2] = clamp(y + ((116130 * u + 32768) >> 16));
}

static void to_rgb(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, uint8_t *rgb, int count) {
    for (int x = 0; x < count; x++) pixel_to_rgb(y[x], cb[x] - 128, cr[x] - 128, rgb + 3 * x);
}

static void grey_to_rgb(const uint8_t *y, uint8_t *rgb, int count) {
    for (int x = 0; x < count; x++) rgb[3 * x] = rgb[3 * x + 1] = rgb[3 * x + 2] = y[x];
}

/* --- pixels, with AVX2 */

#if WITH_AVX2
AVX2 static void mix_rows_avx2(const plane_t *plane, int at, uint8_t *line) {
    const axis_t *down = plane->down;
    const int16_t *weights = down->weights + (size_t)at * down->step;
    const int used = down->used[at], from = plane->across->lowest, to = plane->across->highest;
    const uint8_t *top = plane->memory + (size_t)(down->first[at] - plane->first) * plane->stride;
    const __m256i zero = _mm256_setzero_si256();
    /* A 14-bit weight times a value shifted left by 8 keeps 6 fractional bits after mulhi; each product is truncated. */
    const __m256i half = _mm256_set1_epi16((int16_t)(32 + used / 2));
    for (int x = from; x < to; x += 32) {
        const uint8_t *column = top + x;
        __m256i low = half, high = half;
        for (int k = 0; k < used; k++, column += plane->stride) {
            const __m256i values = _mm256_loadu_si256((const __m256i *)column);
            const __m256i weight = _mm256_set1_epi16(weights[k]);
            low = _mm256_add_epi16(low, _mm256_mulhi_epu16(_mm256_unpacklo_epi8(zero, values), weight));
            high = _mm256_add_epi16(high, _mm256_mulhi_epu16(_mm256_unpackhi_epi8(zero, values), weight));
        }
        low = _mm256_srli_epi16(low, 6);
        high = _mm256_srli_epi16(high, 6);
        _mm256_storeu_si256((__m256i *)(line + x), _mm256_packus_epi16(low, high));
    }
}

AVX2 static void mix_columns_avx2(const axis_t *across, const uint8_t *line, uint8_t *to) {
    const int step = across->step;
    const int16_t *weights = across->weights;
    const uint8_t *masks = across->masks;
    const __m256i half = _mm256_set1_epi32(ONE / 2);
    for (int x = 0; x < across->count; x += 8, weights += 8 * (size_t)step, masks += 8 * (size_t)step) {
        const int *first = across->first + x;
        __m256i sums; /* of pixels 0 1 4 5, 2 3 6 7 */
        if (across->shuffled && step == 4) {
            __m256i two[2];
            for (int j = 0; j < 2; j++) {
                __m128i values = _mm_loadu_si128((const __m128i *)(line + first[4 * j]));
                values = _mm_shuffle_epi8(values, _mm_loadu_si128((const __m128i *)(masks + 16 * j)));
                two[j] = _mm256_madd_epi16(_mm256_cvtepu8_epi16(values),
                                           _mm256_loadu_si256((const __m256i *)(weights + 16 * j)));
            }
            sums = _mm256_hadd_epi32(two[0], two[1]);
        } else if (across->shuffled) {
            __m256i four[4]; /* 0 | 1, 2 | 3, 4 | 5, 6 | 7 */
            for (int j = 0; j < 4; j++) {
                __m128i values = _mm_loadu_si128((const __m128i *)(line + first[2 * j]));
                values = _mm_shuffle_epi8(values, _mm_loadu_si128((const __m128i *)(masks + 16 * j)));
                four[j] = _mm256_madd_epi16(_mm256_cvtepu8_epi16(values),
                                            _mm256_loadu_si256((const __m256i *)(weights + 16 * j)));
            }
            /* 0 2 4 6 | 1 3 5 7 */
            sums = _mm256_hadd_epi32(_mm256_hadd_epi32(four[0], four[1]), _mm256_hadd_epi32(four[2], four[3]));
        } else {
            __m256i four[4];
            for (int j = 0; j < 4; j++) {
                __m256i sum = _mm256_setzero_si256();
                const uint8_t *left = line + first[2 * j], *right = line + first[2 * j + 1];
                const int16_t *of = weights + 2 * j * (size_t)step;
                for (int k = 0; k < step; k += 8) {
                    const __m128i values = _mm_unpacklo_epi64(_mm_loadl_epi64((const __m128i *)(left + k)),
                                                              _mm_loadl_epi64((const __m128i *)(right + k)));
                    const __m256i both = _mm256_inserti128_si256(
                        _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(of + k))),
                        _mm_loadu_si128((const __m128i *)(of + step + k)), 1);
                    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_cvtepu8_epi16(values), both));
                }
                four[j] = sum;
            }
            sums = _mm256_hadd_epi32(_mm256_hadd_epi32(four[0], four[1]), _mm256_hadd_epi32(four[2], four[3]));
        }
        sums = _mm256_srli_epi32(_mm256_add_epi32(sums, half), ONE_BITS);
        const __m256i order = across->shuffled && step == 4 ? _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7)
                                                            : _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        sums = _mm256_permutevar8x32_epi32(sums, order);
        __m128i pixels = _mm_packus_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
        _mm_storel_epi64((__m128i *)(to + x), _mm_packus_epi16(pixels, pixels)); /* lines are padded */
    }
}

/* Interleave sixteen bytes each of red, green and blue. */
AVX2 static inline void interleave(__m128i r, __m128i g, __m128i b, uint8_t *rgb) {
    const __m128i a0 = _mm_setr_epi8(0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1, -1, 5);
    const __m128i a1 = _mm_setr_epi8(-1, 0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1, -1);
    const __m128i a2 = _mm_setr_epi8(-1, -1, 0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, 4, -1);
    const __m128i b0 = _mm_setr_epi8(-1, -1, 6, -1, -1, 7, -1, -1, 8, -1, -1, 9, -1, -1, 10, -1);
    const __m128i b1 = _mm_setr_epi8(5, -1, -1, 6, -1, -1, 7, -1, -1, 8, -1, -1, 9, -1, -1, 10);
    const __m128i b2 = _mm_setr_epi8(-1, 5, -1, -1, 6, -1, -1, 7, -1, -1, 8, -1, -1, 9, -1, -1);
    const __m128i c0 = _mm_setr_epi8(-1, 11, -1, -1, 12, -1, -1, 13, -1, -1, 14, -1, -1, 15, -1, -1);
    const __m128i c1 = _mm_setr_epi8(-1, -1, 11, -1, -1, 12, -1, -1, 13, -1, -1, 14, -1, -1, 15, -1);
    const __m128i c2 = _mm_setr_epi8(10, -1, -1, 11, -1, -1, 12, -1, -1, 13, -1, -1, 14, -1, -1, 15);
    __m128i *to = (__m128i *)rgb;
    _mm_storeu_si128(to, _mm_or_si128(_mm_or_si128(_mm_shuffle_epi8(r, a0), _mm_shuffle_epi8(g, a1)),
                                      _mm_shuffle_epi8(b, a2)));
    _mm_storeu_si128(to + 1, _mm_or_si128(_mm_or_si128(_mm_shuffle_epi8(r, b0), _mm_shuffle_epi8(g, b1)),
                                          _mm_shuffle_epi8(b, b2)));
    _mm_storeu_si128(to + 2, _mm_or_si128(_mm_or_si128(_mm_shuffle_epi8(r, c0), _mm_shuffle_epi8(g, c1)),
                                          _mm_shuffle_epi8(b, c2)));
}

AVX2 static inline __m128i packed(__m256i values) {
    return _mm_packus_epi16(_mm256_castsi256_si128(values), _mm256_extracti128_si256(values, 1));
}

AVX2 static void to_rgb_avx2(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, uint8_t *rgb, int count) {
    const __m256i middle = _mm256_set1_epi16(128), round = _mm256_set1_epi32(1 << 14);
    int x = 0;
    for (; x + 16 <= count; x += 16) {
        const __m256i light = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(y + x)));
        const __m256i u = _mm256_sub_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(cb + x))), middle);
        const __m256i v = _mm256_sub_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(cr + x))), middle);
        /* 1.402 = 1 + 13173 / 32768, 1.772 = 2 - 7471 / 32768 */
        const __m256i red = _mm256_add_epi16(v, _mm256_mulhrs_epi16(v, _mm256_set1_epi16(13173)));
        const __m256i blue = _mm256_add_epi16(_mm256_add_epi16(u, u), _mm256_mulhrs_epi16(u, _mm256_set1_epi16(-7471)));
        const __m256i both = _mm256_set1_epi32((int)((uint32_t)(uint16_t)-11277 | (uint32_t)(uint16_t)-23401 << 16));
        const __m256i low = _mm256_madd_epi16(_mm256_unpacklo_epi16(u, v), both);
        const __m256i high = _mm256_madd_epi16(_mm256_unpackhi_epi16(u, v), both);
        const __m256i green = _mm256_packs_epi32(_mm256_srai_epi32(_mm256_add_epi32(low, round), 15),
                                                 _mm256_srai_epi32(_mm256_add_epi32(high, round), 15));
        interleave(packed(_mm256_add_epi16(light, red)), packed(_mm256_add_epi16(light, green)),
                   packed(_mm256_add_epi16(light, blue)), rgb + 3 * x);
    }
    for (; x < count; x++) pixel_to_rgb(y[x], cb[x] - 128, cr[x] - 128, rgb + 3 * x);
}
#endif

/* --- rendering */

typedef struct {
    uint8_t *down[3], *across[3], *rgb; /* per plane: one row after mix_rows, then after mix_columns */
} lines_t;

static void render(work_t *work, const picture_t *picture, int components, const lines_t *lines) {
    void (*rows)(const plane_t *, int, uint8_t *) = mix_rows;
    void (*columns)(const axis_t *, const uint8_t *, uint8_t *) = mix_columns;
    void (*convert)(const uint8_t *, const uint8_t *, const uint8_t *, uint8_t *, int) = to_rgb;
#if WITH_AVX2
    if (__builtin_cpu_supports("avx2")) rows = mix_rows_avx2, columns = mix_columns_avx2, convert = to_rgb_avx2;
#endif
    const int swapped = picture->orientation >= 5;
    const int wide = swapped ? picture->out_height : picture->out_width;
    const int high = swapped ? picture->out_width : picture->out_height;
    /* Target address of each stored pixel: EXIF orientations reverse the stored axes and, from 5 on, swap them. */
    const int o = picture->orientation;
    const ptrdiff_t row = (ptrdiff_t)picture->out_width * 3;
    int reverse_x = o == 2 || o == 3 || o == 7 || o == 8;
    int reverse_y = o == 3 || o == 4 || o == 6 || o == 7;
    if (picture->flip) {
        if (swapped) reverse_y = !reverse_y;
        else reverse_x = !reverse_x;
    }
    ptrdiff_t dx = swapped ? row : 3, dy = swapped ? 3 : row;
    uint8_t *begin = picture->out;
    if (reverse_x) begin += (wide - 1) * dx, dx = -dx;
    if (reverse_y) begin += (high - 1) * dy, dy = -dy;
    const uint8_t *ready[3];
    for (int at = 0; at < high; at++) {
        for (int part = 0; part < components; part++) {
            const plane_t *plane = &work->planes[part];
            const uint8_t *line = lines->down[part];
            if (plane->down->used[at] == 1) /* no filter: used in place, each row of a plane is padded */
                line = plane->memory + (size_t)(plane->down->first[at] - plane->first) * plane->stride;
            else
                rows(plane, at, lines->down[part]);
            if (plane->across->taps == 1 && plane->across->lowest == 0 && plane->across->highest == wide)
                ready[part] = line;
            else
                columns(plane->across, line, lines->across[part]), ready[part] = lines->across[part];
        }
        uint8_t *to = begin + at * dy;
        uint8_t *rgb = dx == 3 ? to : lines->rgb;
        if (components == 3) convert(ready[0], ready[1], ready[2], rgb, wide);
        else grey_to_rgb(ready[0], rgb, wide);
        if (dx != 3)
            for (int x = 0; x < wide; x++) {
                to[0] = rgb[3 * x], to[1] = rgb[3 * x + 1], to[2] = rgb[3 * x + 2];
                to += dx;
            }
    }
}

static int render_lines(work_t *work, const picture_t *picture, int components) {
    size_t longest = (size_t)(picture->orientation >= 5 ? picture->out_height : picture->out_width);
    for (int part = 0; part < components; part++)
        if ((size_t)work->planes[part].wide > longest) longest = (size_t)work->planes[part].wide;
    /* Weights of 0 may multiply bytes after the end: they must be allocated, their values do not matter. */
    const size_t line_bytes = longest + ROW_PADDING + MAX_TAPS;
    if (!reserve((void **)&work->lines, &work->lines_capacity, 9 * line_bytes)) return 0;
    lines_t lines;
    for (int part = 0; part < 3; part++) {
        lines.down[part] = work->lines + (size_t)part * line_bytes;
        lines.across[part] = work->lines + (size_t)(3 + part) * line_bytes;
    }
    lines.rgb = work->lines + 6 * line_bytes;
    render(work, picture, components, &lines);
    return 1;
}

/* --- one picture */

#define MOST_ENLARGED 2

/* Prepare the axes of a plane, and extend the range of block rows that are needed; 0: not for this decoder. */
static int plan_plane(work_t *work, const picture_t *picture, int part, int *top, int *bottom) {
    struct jpeg_decompress_struct *info = &work->info;
    jpeg_component_info *component = &info->comp_info[part];
    plane_t *plane = &work->planes[part];
    const int swapped = picture->orientation >= 5;
    const double x = component->h_samp_factor * BLOCK_WIDTH(component) / (double)(info->max_h_samp_factor * DCTSIZE);
    const double y = component->v_samp_factor * BLOCK_HEIGHT(component) / (double)(info->max_v_samp_factor * DCTSIZE);
    const double full = 1.0 / picture->factor;
    plane->wide = (int)component->downsampled_width;
    plane->high = (int)component->downsampled_height;
    const int out_wide = swapped ? picture->out_height : picture->out_width;
    const int out_high = swapped ? picture->out_width : picture->out_height;
    double across[2] = {picture->box[0] * x, fmin(picture->box[2] * x, plane->wide)};
    double down[2] = {picture->box[1] * y, fmin(picture->box[3] * y, plane->high)};
    /* Pillow enlarges chroma first, with a triangle filter too, and then shrinks the picture: use one triangle as
     * wide as both together. Where it enlarges the picture, too, this would differ visibly: DOUBLED, see doubled_weight. */
    double scale_x = x / full, scale_y = y / full;
    double wider = 0, higher = 0;
    if (scale_x < 1) {
        double own = fmax((across[1] - across[0]) / out_wide, scale_x);
        wider = scale_x == 0.5 && across[1] - across[0] < 0.5 * out_wide ? DOUBLED : sqrt(1 + own * own - scale_x * scale_x);
    }
    if (scale_y < 1) {
        double own = fmax((down[1] - down[0]) / out_high, scale_y);
        higher = scale_y == 0.5 && down[1] - down[0] < 0.5 * out_high ? DOUBLED : sqrt(1 + own * own - scale_y * scale_y);
    }
    /* Pillow cuts saturated colours off before it enlarges the picture, and this after it: below 45 dB PSNR where small
     * chroma is enlarged much. */
    if ((scale_x < 1 || scale_y < 1) && out_wide * scale_x > MOST_ENLARGED * (across[1] - across[0]) &&
        out_high * scale_y > MOST_ENLARGED * (down[1] - down[0]))
        return 0;
    plane->across = &work->axes[part ? 2 : 0];
    plane->down = &work->axes[part ? 3 : 1];
    /* The chroma planes share their axes; files with chroma planes of different sizes are rare. */
    if (part == 2 && (plane->wide != work->planes[1].wide || plane->high != work->planes[1].high)) return 0;
    if (!prepare_axis(plane->across, across[0], across[1], wider, plane->wide, out_wide, 1)) return 0;
    if (!prepare_axis(plane->down, down[0], down[1], higher, plane->high, out_high, 0)) return 0;
    const int block = component->v_samp_factor * BLOCK_HEIGHT(component);
    int first = plane->down->lowest / block, last = (plane->down->highest - 1) / block;
    if (first < *top) *top = first;
    if (last >= *bottom) *bottom = last + 1;
    return 1;
}

static int read_planes(work_t *work, int top, int bottom) {
    struct jpeg_decompress_struct *info = &work->info;
    const int parts = info->num_components;
    JSAMPROW rows[3][MAX_SAMP_FACTOR * DCTSIZE];
    JSAMPARRAY all[3] = {rows[0], rows[1], rows[2]};
    for (int part = 0; part < parts; part++) {
        jpeg_component_info *component = &info->comp_info[part];
        plane_t *plane = &work->planes[part];
        const size_t high = (size_t)(component->v_samp_factor * BLOCK_HEIGHT(component));
        plane->stride = (size_t)component->width_in_blocks * (size_t)BLOCK_WIDTH(component) + ROW_PADDING;
        plane->first = top * (int)high;
        const size_t bytes = plane->stride * high * (size_t)(bottom - top) + MAX_TAPS;
        if (!reserve((void **)&plane->memory, &plane->capacity, bytes))
            return NO_MEMORY;
        component->component_needed = top == 0; /* otherwise only entropy-decoded */
    }
    const JDIMENSION lines = (JDIMENSION)(info->max_v_samp_factor * PICTURE_BLOCK(info));
    for (int strip = 0; strip < bottom; strip++) {
        for (int part = 0; part < parts; part++) {
            jpeg_component_info *component = &info->comp_info[part];
            plane_t *plane = &work->planes[part];
            const int high = component->v_samp_factor * BLOCK_HEIGHT(component);
            const size_t at = strip < top ? 0 : (size_t)(strip - top) * (size_t)high;
            for (int row = 0; row < high; row++) rows[part][row] = plane->memory + (at + (size_t)row) * plane->stride;
            if (strip == top) component->component_needed = TRUE;
        }
        if (jpeg_read_raw_data(info, all, lines) != lines) return USE_PILLOW;
    }
    /* After the last row, read the rest of the file as Pillow does: libjpeg may warn about it. */
    if (bottom == (int)info->total_iMCU_rows && !jpeg_finish_decompress(info)) return USE_PILLOW;
    return DONE;
}

static int is_valid(const picture_t *picture) {
    const double *box = picture->box;
    return picture->data != NULL && picture->out != NULL && picture->size > 3 && picture->size <= ULONG_MAX &&
           picture->width > 0 && picture->width <= MAX_SIDE && picture->height > 0 && picture->height <= MAX_SIDE &&
           picture->out_width > 0 && picture->out_width <= MAX_SIDE && picture->out_height > 0 &&
           picture->out_height <= MAX_SIDE && picture->orientation >= 1 && picture->orientation <= 8 &&
           (picture->factor == 1 || picture->factor == 2 || picture->factor == 4 || picture->factor == 8) &&
           box[0] >= 0 && box[1] >= 0 && box[0] < box[2] && box[1] < box[3] && box[2] <= picture->width &&
           box[3] <= picture->height;
}

static void init_errors(work_t *work) {
    memset(&work->info, 0, sizeof work->info);
    work->info.err = jpeg_std_error(&work->errors);
    work->errors.error_exit = on_error;
    work->errors.emit_message = on_message;
    work->errors.output_message = on_output;
}

/* Whether a file is baseline grey, or YCbCr whose chroma is subsampled by 1 or 2 on each axis. Chroma at a quarter is
 * left to Pillow: libjpeg repeats its pixels, and enlarges others with a triangle. */
static int is_supported(const struct jpeg_decompress_struct *info) {
    const jpeg_component_info *parts = info->comp_info;
    if (info->data_precision != 8 || info->progressive_mode || info->arith_code) return 0;
    if (info->num_components == 1) return info->jpeg_color_space == JCS_GRAYSCALE;
    if (info->num_components != 3 || info->jpeg_color_space != JCS_YCbCr) return 0;
    return parts[0].h_samp_factor == info->max_h_samp_factor && parts[0].v_samp_factor == info->max_v_samp_factor &&
           info->max_h_samp_factor <= 2 && info->max_v_samp_factor <= 2 && parts[1].h_samp_factor == 1 &&
           parts[1].v_samp_factor == 1 && parts[2].h_samp_factor == 1 && parts[2].v_samp_factor == 1;
}

static int decode(work_t *work, const picture_t *picture) {
    struct jpeg_decompress_struct *info = &work->info;
    if (!is_valid(picture)) return USE_PILLOW;
    init_errors(work);
    if (setjmp(work->jump)) {
        if (info->mem != NULL) jpeg_destroy_decompress(info);
        return USE_PILLOW;
    }
    jpeg_create_decompress(info);
    int status = USE_PILLOW;
    jpeg_mem_src(info, (unsigned char *)picture->data, (unsigned long)picture->size);
    if (jpeg_read_header(info, TRUE) == JPEG_HEADER_OK && info->image_width == (JDIMENSION)picture->width &&
        info->image_height == (JDIMENSION)picture->height && is_supported(info) && !jpeg_has_multiple_scans(info)) {
        info->scale_num = 1;
        info->scale_denom = (unsigned)picture->factor;
        info->raw_data_out = TRUE;
        info->dct_method = JDCT_ISLOW;
        jpeg_start_decompress(info);
        int top = INT_MAX, bottom = 0, fits = 1;
        for (int part = 0; fits && part < info->num_components; part++)
            fits = plan_plane(work, picture, part, &top, &bottom);
        if (fits && bottom <= (int)info->total_iMCU_rows) status = read_planes(work, top, bottom);
        if (status == DONE && !render_lines(work, picture, info->num_components)) status = NO_MEMORY;
    }
    jpeg_destroy_decompress(info);
    return status;
}

/* --- functions that Python calls */

EXPORT int aiofeed_picture_bytes(void) {
    return (int)sizeof(picture_t);
}

static int can_decompress(work_t *work) {
    init_errors(work);
    if (setjmp(work->jump)) return 0;
    jpeg_create_decompress(&work->info);
    jpeg_destroy_decompress(&work->info);
    return 1;
}

/* Version of libjpeg-turbo that this was built for; NULL if an incompatible one was loaded. */
EXPORT const char *aiofeed_libjpeg(void) {
    work_t *work = calloc(1, sizeof *work);
    const int usable = work != NULL && can_decompress(work);
    free(work);
    return usable ? VERSION_TEXT(LIBJPEG_TURBO_VERSION) : NULL;
}

/* The instruction set that computes the pixels: the results of the two may differ by one level. */
EXPORT const char *aiofeed_arithmetic(void) {
#if WITH_AVX2
    if (__builtin_cpu_supports("avx2")) return "AVX2";
#endif
    return "portable";
}

/* Decode `count` pictures, and set the status of each. */
EXPORT void aiofeed_decode(picture_t *pictures, int count) {
    work_t *work = calloc(1, sizeof *work);
    for (int at = 0; at < count; at++) {
        pictures[at].status = work == NULL ? NO_MEMORY : decode(work, &pictures[at]);
        if (work == NULL) continue;
        for (int part = 0; part < 3; part++)
            if (work->planes[part].capacity > MAX_REUSED_BYTES) {
                free(work->planes[part].memory);
                work->planes[part].memory = NULL;
                work->planes[part].capacity = 0;
            }
    }
    if (work == NULL) return;
    for (int part = 0; part < 3; part++) free(work->planes[part].memory);
    for (int side = 0; side < 4; side++) free(work->axes[side].first);
    free(work->lines);
    free(work);
}

static unsigned u16(const uint8_t *at) {
    return (unsigned)at[0] << 8 | at[1];
}

/* Read width and height, as stored; returns whether the file is plain. Source: ITU T.81, annex B. */
static int read_header(const uint8_t *data, uint64_t size, int64_t max_metadata, int32_t *wide, int32_t *high) {
    int kind = PLAIN;
    uint64_t at = 2;
    *wide = *high = 0;
    if (size < 8 || memcmp(data, "\xff\xd8\xff", 3) || memcmp(data + size - 2, "\xff\xd9", 2)) return NOT_PLAIN;
    while (at + 4 <= size && at < (uint64_t)max_metadata) {
        const unsigned marker = u16(data + at), length = u16(data + at + 2);
        if (length < 2 || at + 2 + length > size) return NOT_PLAIN;
        if (marker == 0xFFC0 || marker == 0xFFC1) {
            if (*wide || length < 8) return NOT_PLAIN;
            const uint8_t *frame = data + at + 4;
            *high = (int32_t)u16(frame + 1);
            *wide = (int32_t)u16(frame + 3);
            if (frame[0] != 8 || (frame[5] != 1 && frame[5] != 3) || !*wide || !*high) return NOT_PLAIN;
        } else if (marker == 0xFFDA) {
            return *wide ? kind : NOT_PLAIN;
        } else if (marker == 0xFFE1) {
            kind = WITH_METADATA;
        } else if (marker != 0xFFDB && marker != 0xFFC4 && marker != 0xFFDD && marker != 0xFFFE &&
                   !(marker >= 0xFFE0 && marker <= 0xFFEF)) {
            return NOT_PLAIN;
        }
        at += 2 + length;
    }
    return NOT_PLAIN;
}

/* Read the headers of `count` files; writes kind, width and height of each to `headers`. */
EXPORT void aiofeed_headers(const uint8_t *const *data, const uint64_t *sizes, int count, int64_t max_metadata,
                            int32_t *headers) {
    for (int at = 0; at < count; at++, headers += 3)
        headers[0] = read_header(data[at], sizes[at], max_metadata, headers + 1, headers + 2);
}
