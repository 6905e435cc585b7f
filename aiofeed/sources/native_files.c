/* Small files, a group of them in one call, without Python and so without its lock.
 *
 * What is given is what sources/reading.py would have given. Whatever is out of the ordinary (a file that is missing,
 * large, empty, no file at all, or changes meanwhile) is left to it, which finds out what it is and says so.
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

/* Raised whenever the call below changes. */
EXPORT int32_t aiofeed_groups_release(void) { return RELEASE; }

static int same(const struct stat *one, const struct stat *other)
{
    return one->st_size == other->st_size && MODIFIED(one).tv_sec == MODIFIED(other).tv_sec &&
           MODIFIED(one).tv_nsec == MODIFIED(other).tv_nsec;
}

/* Read `count` files, whose names follow each other in `names`, each with a NUL at its end, one behind the other into
 * `out`. `sizes[i]` is what file `i` took, or LEFT. Returns how many files were looked at: fewer than `count` where the
 * next one finds no room any more; it does in an empty `out`, which has more than `most` bytes. */
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
            /* One byte more shows whether the file has grown. */
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
