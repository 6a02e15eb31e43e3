// What the test programs share: each ends by itself, and says which check failed.
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <semaphore.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <sys/syscall.h>
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

// From now on the kernel refuses a call with this error, where an argument has these bits.
static inline void refuse(unsigned call, unsigned error, unsigned argument, unsigned bits) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 4),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args) + 8 * argument),
        BPF_STMT(BPF_ALU | BPF_AND | BPF_K, bits),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, bits, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof code / sizeof *code, .filter = code};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}
