// What the test programs share: each ends by itself, and says which check failed.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <semaphore.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                                      \
    do {                                                                                                      \
        if (!(condition)) {                                                                                   \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, strerror(errno));              \
            exit(1);                                                                                          \
        }                                                                                                     \
    } while (0)

// A call that fails with this error number.
#define FAILS(call, number)                                                                                   \
    do {                                                                                                      \
        errno = 0;                                                                                            \
        CHECK((long)(call) == -1 && errno == (number));                                                       \
    } while (0)

// A call that succeeds, and leaves errno alone.
#define WORKS(call)                                                                                           \
    ({                                                                                                        \
        errno = 77;                                                                                           \
        __typeof__(call) result_ = (call);                                                                    \
        CHECK((long)result_ != -1 && errno == 77);                                                            \
        result_;                                                                                              \
    })

static inline const char *directory(void) {
    const char *dir = getenv("SHMESH_DIR");
    return dir ? dir : "/dev/shm";
}

static inline const char *path_of(const char *name) {
    static char paths[4][4096];
    static unsigned next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", directory(), name);
    return path;
}

static inline mode_t mode_of(const char *name) {
    struct stat found;
    CHECK(lstat(path_of(name), &found) == 0);
    return found.st_mode & 07777;
}

static inline int exists(const char *name) {
    return access(path_of(name), F_OK) == 0;
}
