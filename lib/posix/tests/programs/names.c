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

// The argument is a name that no other program has, because without the library it is one of the machine's.
int main(int argc, char **argv) {
    alarm(300);
    CHECK(argc == 2 && strlen(argv[1]) < 100);
    const char *own = argv[1];
    char name[302];
    for (const char **form = (const char *[]){"", "/", "//", "///%s", "/%s/b", "%s/b", "..", "/..", ".", "/.", "../%s", "/%s/", "%s", "/%s y", NULL};
         *form; form++) {
        if (strstr(*form, "%s")) {
            const char *rest = strstr(*form, "%s") + 2;
            snprintf(name, sizeof name, "%.*s%s%s", (int)(rest - 2 - *form), *form, own, rest);
        } else {
            strcpy(name, *form);
        }
        say(name);
    }
    for (size_t len = 245; len < 260; len++) {
        memset(name, 'n', len);
        memcpy(name + 1, own, strlen(own));
        name[len] = 0;
        say(name);
        name[0] = '/';
        say(name);
    }
    return 0;
}
