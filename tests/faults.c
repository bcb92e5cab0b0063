/* Preloaded, this library makes calls of the file system under one folder fail, whoever makes them.
 *
 * fault_arm(folder, nth, number, lasting): the nth matching call from now on fails with that errno, and if lasting all
 * that follow it; nth 0 only counts. What was called is kept as lines "call path", to be asked for by fault_call(n).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define MOST 8192

static char folder[PATH_MAX], calls[MOST][256];
static int armed, number, lasting;
static long nth, count;

void fault_arm(const char *where, long n, int errnum, int lasts) {
    armed = 0;
    snprintf(folder, sizeof folder, "%s", where);
    nth = n, number = errnum, lasting = lasts, count = 0;
    armed = folder[0] != 0;
}

long fault_count(void) { return count; }
const char *fault_call(long n) { return calls[n % MOST]; }

static int fails(const char *call, const char *path) {
    if (!armed || !path || strncmp(path, folder, strlen(folder))) return 0;
    snprintf(calls[count % MOST], sizeof calls[0], "%s %s", call, path + strlen(folder));
    count++;
    if (!nth || count < nth || (count > nth && !lasting)) return 0;
    errno = number;
    return 1;
}

static int fails_of(const char *call, int fd) {
    char link[64], path[PATH_MAX];
    if (!armed) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return fails(call, path);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, int); va_end(rest); }
#define KIND(flags) ((flags) & (O_WRONLY | O_RDWR) ? "create" : "open")

int open(const char *path, int flags, ...) {
    MODE(flags)
    return fails(KIND(flags), path) ? -1 : REAL(open)(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    MODE(flags)
    return fails(KIND(flags), path) ? -1 : REAL(open64)(path, flags, mode);
}
int openat64(int at, const char *path, int flags, ...) {
    MODE(flags)
    return fails(KIND(flags), path) ? -1 : REAL(openat64)(at, path, flags, mode);
}
FILE *fopen(const char *path, const char *mode) { return fails("open", path) ? NULL : REAL(fopen)(path, mode); }
FILE *fopen64(const char *path, const char *mode) { return fails("open", path) ? NULL : REAL(fopen64)(path, mode); }
ssize_t write(int fd, const void *data, size_t size) {
    return fails_of("write", fd) ? -1 : REAL(write)(fd, data, size);
}
ssize_t writev(int fd, const struct iovec *parts, int n) {
    return fails_of("write", fd) ? -1 : REAL(writev)(fd, parts, n);
}
ssize_t sendfile64(int out, int in, off64_t *offset, size_t size) {
    ssize_t (*real)(int, int, off64_t *, size_t) = dlsym(RTLD_NEXT, "sendfile64");
    return fails_of("write", out) ? -1 : real(out, in, offset, size);
}
int rename(const char *from, const char *to) { return fails("rename", to) ? -1 : REAL(rename)(from, to); }
int mkdir(const char *path, mode_t mode) { return fails("mkdir", path) ? -1 : REAL(mkdir)(path, mode); }
int unlink(const char *path) { return fails("unlink", path) ? -1 : REAL(unlink)(path); }
int fsync(int fd) { return fails_of("fsync", fd) ? -1 : REAL(fsync)(fd); }
int fdatasync(int fd) { return fails_of("fsync", fd) ? -1 : REAL(fdatasync)(fd); }
int flock(int fd, int operation) { return fails_of("flock", fd) ? -1 : REAL(flock)(fd, operation); }
