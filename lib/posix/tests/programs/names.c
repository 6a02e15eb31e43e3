// What shm_open, sem_open and shm_unlink say of names: the same with the library and without it.
#include "check.h"

static void say(const char *name) {
    printf("%.12s.. %zu:", name, strlen(name));
    errno = 0;
    int fd = shm_open(name, O_CREAT | O_RDWR, 0600);
    printf(" shm_open %d", fd < 0 ? errno : 0);
    errno = 0;
    int removed = shm_unlink(name);
    printf(" shm_unlink %d", removed < 0 ? errno : 0);
    errno = 0;
    sem_t *semaphore = sem_open(name, O_CREAT, 0600, 1);
    printf(" sem_open %d", semaphore == SEM_FAILED ? errno : 0);
    errno = 0;
    removed = sem_unlink(name);
    printf(" sem_unlink %d\n", removed < 0 ? errno : 0);
}

int main(void) {
    alarm(300);
    char long_name[302];
    for (const char **name = (const char *[]){"", "/", "//", "///x", "/a/b", "a/b", "..", "/..", ".", "/.", "../x", "/x/", "x", "/x y", NULL};
         *name; name++) {
        say(*name);
    }
    for (size_t len = 245; len < 260; len++) {
        memset(long_name, 'n', len);
        long_name[len] = 0;
        say(long_name);
        long_name[0] = '/';
        say(long_name);
    }
    return 0;
}
