/* Reads small files, several in one call, without Python's GIL.
 *
 * Returns the bytes that kernel/sources/file_io.py would return. A file that is missing, large, empty, not a regular file, or
 * changed during the read is marked as not read: file_io.py reads it and reports what is wrong.
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

enum { VERSION = 1, NOT_READ = -1 };

#ifdef __APPLE__
#define MODIFIED(status) ((status)->st_mtimespec)
#else
#define MODIFIED(status) ((status)->st_mtim)
#endif

/* Version of the interface; file_io.py expects the same number. */
EXPORT int32_t aiofeed_files_version(void) { return VERSION; }

static int is_unchanged(const struct stat *before, const struct stat *after)
{
    return before->st_size == after->st_size && MODIFIED(before).tv_sec == MODIFIED(after).tv_sec &&
           MODIFIED(before).tv_nsec == MODIFIED(after).tv_nsec;
}

/* Read `count` files of at most `max_bytes` each into `out`, one after the other.
 *
 * `names` holds their paths, each ended by a NUL. Sets `sizes[i]` to the bytes of file `i`, or to NOT_READ. Returns the
 * number of files processed, which is less than `count` if `out` is full. `capacity` must exceed `max_bytes`, so that
 * any file fits into an empty `out`. */
EXPORT int32_t aiofeed_read_group(const char *names, int32_t count, int32_t flags, uint64_t max_bytes, uint8_t *out,
                                  uint64_t capacity, int64_t *sizes)
{
    for (int32_t at = 0; at < count; at++, names += strlen(names) + 1) {
        struct stat before, after;
        int file = open(names, flags);

        sizes[at] = NOT_READ;
        if (file < 0)
            continue;
        if (fstat(file, &before) == 0 && S_ISREG(before.st_mode) && before.st_size > 0 &&
            (uint64_t)before.st_size <= max_bytes) {
            /* Ask for one byte more, to notice a file that has grown. */
            uint64_t wanted = (uint64_t)before.st_size + 1;

            if (wanted > capacity) {
                close(file);
                return at;
            }
            if (read(file, out, wanted) == before.st_size && fstat(file, &after) == 0 && is_unchanged(&before, &after)) {
                sizes[at] = before.st_size;
                out += before.st_size;
                capacity -= (uint64_t)before.st_size;
            }
        }
        close(file);
    }
    return count;
}
