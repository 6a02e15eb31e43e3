// What the program sees of calls that the kernel refuses: the error, and nothing left behind. The argument says which calls.
#include "check.h"
#include <sys/resource.h>

// In a process of its own, because a refusal cannot be taken back.
static void apart(void (*steps)(void)) {
    pid_t child = fork();
    if (child == 0) {
        steps();
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

static void *opened_semaphore(void) {
    sem_t *semaphore = sem_open("/refused", O_CREAT, 0600, 1);
    return semaphore == SEM_FAILED ? (void *)-1 : semaphore;
}

static void no_memory_to_open(void) {
    refuse(SYS_openat, ENOMEM, 0, 0);
    FAILS(shm_open("/refused", O_CREAT | O_RDWR, 0600), ENOMEM);
    FAILS(open(path_of("refused"), O_CREAT | O_RDWR, 0600), ENOMEM);
    FAILS(opened_semaphore(), ENOMEM);
    FAILS(shmget(0x5EED0001, 4096, IPC_CREAT | 0600), ENOMEM);
}

// An error of the limit is an error of the file system for the program.
static void no_memory_to_reserve(void) {
    int fd = WORKS(shm_open("/refused", O_CREAT | O_RDWR, 0600));
    WORKS(ftruncate(fd, 4096));
    refuse(SYS_fallocate, ENOMEM, 0, 0);
    FAILS(ftruncate(fd, 8192), ENOSPC);
    struct stat found;
    CHECK(fstat(fd, &found) == 0 && found.st_size == 4096);
    FAILS(shmget(0x5EED0002, 4096, IPC_CREAT | 0600), ENOSPC);
    FAILS(shmget(0x5EED0002, 0, 0), ENOENT);
    WORKS(shm_unlink("/refused"));
}

static void no_memory_to_map(void) {
    int id = WORKS(shmget(IPC_PRIVATE, 4096, 0600));
    refuse(SYS_mmap, ENOMEM, 3, MAP_SHARED);
    FAILS(opened_semaphore(), ENOMEM);
    FAILS(shmat(id, NULL, 0), ENOMEM);
    struct shmid_ds state;
    CHECK(shmctl(id, IPC_STAT, &state) == 0 && state.shm_nattch == 0);
    WORKS(shmctl(id, IPC_RMID, NULL));
    // As with the C library: the semaphore is made, and cannot be mapped.
    WORKS(sem_unlink("/refused"));
}

static void no_descriptors(void) {
    close(WORKS(shm_open("/refused", O_CREAT | O_RDWR, 0600)));
    struct rlimit none = {.rlim_cur = 3, .rlim_max = 3};
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
    FAILS(shm_open("/refused", O_RDWR, 0), EMFILE);
    FAILS(shm_open("/other", O_CREAT | O_RDWR, 0600), EMFILE);
    WORKS(shm_unlink("/refused"));
}

// A file system without locks: files are shared as without leases.
static void no_locks(void) {
    refuse(SYS_fcntl, ENOLCK, 1, F_OFD_SETLK);
    int fd = WORKS(shm_open("/refused", O_CREAT | O_RDWR, 0600));
    close(WORKS(shm_open("/refused", O_RDWR, 0)));
    close(fd);
    WORKS(shm_unlink("/refused"));
}

// A process that keeps the bytes of leases locked for ever, as no collector does: the call ends, with an error.
static void locked_for_ever(void) {
    const char *names[] = {"refused", "sem.refused", "sysv.5eed0003"};
    close(WORKS(shm_open("/refused", O_CREAT | O_RDWR, 0600)));
    CHECK(sem_close(sem_open("/refused", O_CREAT, 0600, 1)) == 0);
    pid_t maker = fork();
    if (maker == 0) {
        _exit(shmget(0x5EED0003, 4096, IPC_CREAT | 0600) < 0);
    }
    int status;
    CHECK(waitpid(maker, &status, 0) == maker && status == 0);
    for (int i = 0; i < 3; i++) {
        int fd = syscall(SYS_openat, AT_FDCWD, path_of(names[i]), O_RDWR);
        struct flock all = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 1L << 62, .l_len = 1L << 31};
        CHECK(syscall(SYS_fcntl, fd, F_OFD_SETLK, &all) == 0);
    }
    for (int i = 0; i < 3; i++) {
        if (fork() == 0) {
            if (i == 0) {
                FAILS(shm_open("/refused", O_CREAT | O_RDWR, 0600), EAGAIN);
            } else if (i == 1) {
                FAILS(opened_semaphore(), EAGAIN);
            } else {
                FAILS(shmget(0x5EED0003, 4096, IPC_CREAT | 0600), EAGAIN);
            }
            _exit(0);
        }
    }
    for (int i = 0; i < 3; i++) {
        CHECK(wait(&status) > 0 && status == 0);
    }
    // The name can be removed, and the others go on with new files.
    for (int i = 0; i < 3; i++) {
        CHECK(unlink(path_of(names[i])) == 0);
    }
    close(WORKS(shm_open("/refused", O_CREAT | O_RDWR, 0600)));
    WORKS(shm_unlink("/refused"));
}

int main(int argc, char **argv) {
    alarm(300);
    CHECK(argc == 2);
    if (!strcmp(argv[1], "locked")) {
        locked_for_ever();
        return 0;
    }
    apart(no_memory_to_open);
    apart(no_memory_to_reserve);
    apart(no_memory_to_map);
    apart(no_descriptors);
    apart(no_locks);
    return 0;
}
