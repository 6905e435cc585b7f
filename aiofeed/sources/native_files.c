/* Reads a group of small files in one call, without the GIL.
 *
 * The results are those of sources/file_io.py, which also handles every other case (a file that is missing, large, empty,
 * not regular, or that changes while it is read) and reports the errors.
 */

#define _GNU_SOURCE
#define _DARWIN_C_SOURCE
#define _FILE_OFFSET_BITS 64

#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { RELEASE = 1, LEFT = -1 };

#ifdef __APPLE__
#define MODIFIED(seen) ((seen)->st_mtimespec)
#else
#define MODIFIED(seen) ((seen)->st_mtim)
#endif

/* Increase it when the signature of aiofeed_read_group changes. */
EXPORT int32_t aiofeed_groups_release(void) { return RELEASE; }

static int same(const struct stat *one, const struct stat *other)
{
    return one->st_size == other->st_size && MODIFIED(one).tv_sec == MODIFIED(other).tv_sec &&
           MODIFIED(one).tv_nsec == MODIFIED(other).tv_nsec;
}

/* Reads `count` files, whose NUL-terminated names are in `names`, into `out`, one after another. `sizes[i]` is the number
 * of bytes of file `i`, or LEFT. Returns the number of files processed, which is less than `count` if the next file does
 * not fit into `out`. Any file fits into an empty `out`, which has more than `most` bytes. */
EXPORT int32_t aiofeed_read_group(const char *names, int32_t count, int32_t flags, uint64_t most, uint8_t *out,
                                  uint64_t room, int64_t *sizes)
{
    for (int32_t at = 0; at < count; at++, names += strlen(names) + 1) {
        struct stat before, after;
        int file = open(names, flags);

        sizes[at] = LEFT;
        if (file < 0)
            continue;
        if (fstat(file, &before) == 0 && S_ISREG(before.st_mode) && before.st_size > 0 &&
            (uint64_t)before.st_size <= most) {
            /* One more byte detects a file that has grown. */
            uint64_t wanted = (uint64_t)before.st_size + 1;

            if (wanted > room) {
                close(file);
                return at;
            }
            if (read(file, out, wanted) == before.st_size && fstat(file, &after) == 0 && same(&before, &after)) {
                sizes[at] = before.st_size;
                out += before.st_size;
                room -= (uint64_t)before.st_size;
            }
        }
        close(file);
    }
    return count;
}
