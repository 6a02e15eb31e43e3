// POSIX shared memory and files of the IPC directory, in one process and its children.
#include "check.h"
#include <ucontext.h>

static void modes(void) {
    umask(022);
    int fd = WORKS(shm_open("/secret", O_CREAT | O_EXCL | O_RDWR, 0600));
    CHECK(mode_of("secret") == 01660);
    CHECK(fcntl(fd, F_GETFD) == FD_CLOEXEC);
    // As the C library says it.
    CHECK((fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDWR);
    WORKS(fchmod(fd, 0600));
    CHECK(mode_of("secret") == 01660);
    WORKS(chmod(path_of("secret"), 0644));
    CHECK(mode_of("secret") == 01664);
    close(fd);
    fd = WORKS(shm_open("open", O_CREAT | O_RDONLY, 0777));
    CHECK(mode_of("open") == 01664);
    close(fd);
    umask(077);
    fd = WORKS(open(path_of("file"), O_CREAT | O_RDWR, 0666));
    CHECK(mode_of("file") == 01660);
    // The name is the program's, also where others look.
    char link[64], name[4096] = {0};
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    CHECK(readlink(link, name, sizeof name - 1) > 0 && strcmp(name, path_of("file")) == 0);
    close(fd);
    // A file that is only written is for a later reader, and stays when it is closed.
    fd = WORKS(creat(path_of("written"), 0600));
    CHECK(write(fd, "x", 1) == 1 && mode_of("written") == 0660);
    close(fd);
    fd = WORKS(openat(AT_FDCWD, path_of("script"), O_CREAT | O_WRONLY | O_TRUNC, 0755));
    CHECK(mode_of("script") == 0770 - 0010);
    close(fd);
    fd = WORKS(open64(path_of("written"), O_RDWR));
    char byte;
    CHECK(read(fd, &byte, 1) == 1 && byte == 'x' && mode_of("written") == 0660);
    close(fd);
    // Execute bits are not lost: the mark is.
    close(WORKS(open(path_of("program"), O_CREAT | O_RDWR, 0755)));
    CHECK(mode_of("program") == 0770 - 0010);
    WORKS(chmod(path_of("secret"), 0700));
    CHECK(mode_of("secret") == 0760);
    close(WORKS(open(path_of("changed"), O_CREAT | O_RDWR, 0600)));
    WORKS(fchmodat(AT_FDCWD, path_of("changed"), 0600, 0));
    CHECK(mode_of("changed") == 01660);
    int dir = open(directory(), O_RDONLY | O_DIRECTORY);
    WORKS(fchmodat(dir, "changed", 0600, 0));
    CHECK(mode_of("changed") == 01660);
    close(dir);
    // No collector could open it.
    close(WORKS(open(path_of("read-only"), O_CREAT | O_RDWR, 0400)));
    CHECK(mode_of("read-only") == 0440);
    for (const char **name =
             (const char *[]){"secret", "open", "file", "written", "script", "program", "changed", "read-only", NULL};
         *name; name++) {
        WORKS(shm_unlink(*name));
    }
    umask(022);
}

static int is_leased(const char *name) {
    int fd = syscall(SYS_openat, AT_FDCWD, path_of(name), O_RDWR);
    CHECK(fd >= 0);
    struct flock lease = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 1L << 62, .l_len = 1};
    CHECK(syscall(SYS_fcntl, fd, F_OFD_GETLK, &lease) == 0);
    syscall(SYS_close, fd);
    return lease.l_type != F_UNLCK;
}

// As NCCL makes its memory.
static void templates(void) {
    char name[4200];
    for (int i = 0; i < 3; i++) {
        snprintf(name, sizeof name, "%s/nccl-XXXXXX%s", directory(), i == 0 ? "" : ".so");
        int fd = i == 0 ? WORKS(mkstemp(name)) : i == 1 ? WORKS(mkstemps(name, 3)) : WORKS(mkostemps(name, 3, O_CLOEXEC));
        const char *last = strrchr(name, '/') + 1;
        CHECK(!strstr(last, "XXXXXX") && !strncmp(last, "nccl-", 5) && mode_of(last) == 01660 && is_leased(last));
        CHECK((fcntl(fd, F_GETFD) == FD_CLOEXEC) == (i == 2) && (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDWR);
        close(fd);
        CHECK(!is_leased(last));
        WORKS(unlink(name));
    }
    // As the C library says it.
    for (const char **wrong = (const char *[]){"XXXXX", "XXXXXXa", "XXXXXX.so", NULL}; *wrong; wrong++) {
        snprintf(name, sizeof name, "%s/%s", directory(), *wrong);
        FAILS(mkstemp(name), EINVAL);
    }
    FAILS(mkstemps(name, -1), EINVAL);
    FAILS(mkstemps(name, 5000), EINVAL);
    snprintf(name, sizeof name, "%s/none/XXXXXX", directory());
    FAILS(mkstemp(name), ENOENT);
    char elsewhere[] = "/tmp/shmesh-posix-XXXXXX";
    struct stat found;
    int fd = WORKS(mkstemp(elsewhere));
    CHECK(fstat(fd, &found) == 0 && (found.st_mode & 07777) == 0600 && unlink(elsewhere) == 0);
    close(fd);
}

static void other_paths(void) {
    char dir[] = "/tmp/shmesh-posix-XXXXXX", path[4200];
    CHECK(mkdtemp(dir));
    snprintf(path, sizeof path, "%s/file", dir);
    int fd = WORKS(open(path, O_CREAT | O_RDWR, 0600));
    struct stat found;
    CHECK(fstat(fd, &found) == 0 && (found.st_mode & 07777) == 0600);
    // Sparse: elsewhere nothing is reserved.
    WORKS(ftruncate(fd, 1 << 20));
    CHECK(fstat(fd, &found) == 0 && found.st_blocks == 0);
    close(fd);
    unlink(path);
    rmdir(dir);
    // A path that leaves the directory is not below it.
    snprintf(path, sizeof path, "%s/../shmesh-posix-elsewhere", directory());
    fd = WORKS(open(path, O_CREAT | O_RDWR, 0600));
    CHECK(fstat(fd, &found) == 0 && (found.st_mode & 07777) == 0600);
    close(fd);
    unlink(path);
    // Nor is another file of its file system: its mode and size are what the program says.
    snprintf(path, sizeof path, "%s/../shmesh-posix-%d", directory(), getpid());
    fd = WORKS(open(path, O_CREAT | O_RDWR, 0600));
    WORKS(fchmod(fd, 0600));
    WORKS(ftruncate(fd, 1L << 40));
    CHECK(fstat(fd, &found) == 0 && (found.st_mode & 07777) == 0600 && found.st_blocks == 0);
    close(fd);
    unlink(path);
    // Subdirectories are below.
    CHECK(mkdir(path_of("sub"), 0700) == 0);
    FAILS(open(path_of("sub"), O_CREAT | O_RDONLY, 0600), EISDIR);
    close(WORKS(open(path_of("sub"), O_RDONLY)));
    close(WORKS(open(path_of("sub/file"), O_CREAT | O_RDWR, 0600)));
    CHECK(mode_of("sub/file") == 01660);
    unlink(path_of("sub/file"));
    CHECK(rmdir(path_of("sub")) == 0);
    FAILS(open(path_of("none/file"), O_CREAT | O_RDWR, 0600), ENOENT);
    FAILS(open(path_of("none"), O_RDWR), ENOENT);
    const char *volatile nothing = NULL;
    FAILS(open(nothing, O_RDWR), EFAULT);
    // Links: followed by open, refused by shm_open.
    close(WORKS(open(path_of("target"), O_CREAT | O_RDWR, 0600)));
    CHECK(symlink("target", path_of("link")) == 0 && symlink("nothing", path_of("dangling")) == 0);
    close(WORKS(open(path_of("link"), O_RDWR)));
    FAILS(shm_open("link", O_RDWR, 0), ELOOP);
    FAILS(open(path_of("link"), O_CREAT | O_EXCL | O_RDWR, 0600), EEXIST);
    close(WORKS(open(path_of("dangling"), O_CREAT | O_RDWR, 0600)));
    CHECK(exists("nothing"));
    unlink(path_of("nothing"));
    unlink(path_of("dangling"));
    unlink(path_of("link"));
    unlink(path_of("target"));
}

// Paths that do not show where they lead, and functions that open files inside the C library.
static void other_ways(void) {
    close(WORKS(open(path_of("way"), O_CREAT | O_RDWR, 0600)));
    CHECK(!is_leased("way"));
    char before[4096], link[64];
    CHECK(getcwd(before, sizeof before) && chdir(directory()) == 0);
    int fd = WORKS(open("way", O_RDWR));
    CHECK(is_leased("way") && chdir(before) == 0);
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int other = WORKS(open(link, O_RDONLY));
    close(fd);
    CHECK(is_leased("way"));
    close(other);
    int dir = open(directory(), O_RDONLY | O_DIRECTORY);
    fd = WORKS(openat(dir, "way", O_RDWR));
    CHECK(is_leased("way"));
    close(fd);
    close(dir);
    CHECK(mkdir(path_of("sub"), 0700) == 0);
    fd = WORKS(open(path_of("sub/../way"), O_RDWR));
    CHECK(is_leased("way") && rmdir(path_of("sub")) == 0);
    close(fd);
    errno = 77;
    FILE *file = fopen(path_of("way"), "r+");
    CHECK(file && errno == 77 && is_leased("way"));
    fclose(file);
    CHECK(!is_leased("way"));
    unlink(path_of("way"));
}

// A collector that is off its processor between two of its calls: openers wait for it, and never open what it removes.
static void slow_collector(void) {
    const char *names[] = {"slow", "sem.slow", "sysv.51030001"};
    CHECK(close(shm_open("/slow", O_CREAT | O_EXCL | O_RDWR, 0600)) == 0);
    CHECK(sem_close(sem_open("/slow", O_CREAT | O_EXCL, 0600, 3)) == 0);
    pid_t maker = fork();
    if (maker == 0) {
        _exit(shmget(0x51030001, 4096, IPC_CREAT | IPC_EXCL | 0600) < 0);
    }
    int status;
    CHECK(waitpid(maker, &status, 0) == maker && status == 0);
    ino_t before[3];
    int fds[3];
    for (int i = 0; i < 3; i++) {
        struct stat found;
        fds[i] = syscall(SYS_openat, AT_FDCWD, path_of(names[i]), O_RDWR);
        struct flock all = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 1L << 62, .l_len = 1L << 31};
        CHECK(syscall(SYS_fcntl, fds[i], F_OFD_SETLK, &all) == 0 && fstat(fds[i], &found) == 0);
        before[i] = found.st_ino;
    }
    pid_t collector = fork();
    if (collector == 0) {
        usleep(200000);
        for (int i = 0; i < 3; i++) {
            CHECK(unlink(path_of(names[i])) == 0);
        }
        _exit(0);
    }
    for (int i = 0; i < 3; i++) {
        syscall(SYS_close, fds[i]);
    }
    // Three that start at once.
    for (int i = 0; i < 3; i++) {
        if (fork() == 0) {
            if (i == 0) {
                CHECK(shm_open("/slow", O_CREAT | O_RDWR, 0600) >= 0);
            } else if (i == 1) {
                int value;
                sem_t *opened = sem_open("/slow", O_CREAT, 0600, 5);
                CHECK(opened != SEM_FAILED && sem_getvalue(opened, &value) == 0 && value == 5);
            } else {
                CHECK(shmget(0x51030001, 4096, IPC_CREAT | 0600) >= 0);
            }
            struct stat found;
            CHECK(stat(path_of(names[i]), &found) == 0 && found.st_ino != before[i] && is_leased(names[i]));
            _exit(0);
        }
    }
    for (int i = 0; i < 4; i++) {
        CHECK(wait(&status) > 0 && status == 0);
    }
    for (int i = 0; i < 3; i++) {
        CHECK(unlink(path_of(names[i])) == 0);
    }
}

#ifdef __x86_64__
// A collector that removes the name between the opening of a file and its lease: the lock is a trap, in which the name goes away.
#define OURS 0x5EED
static const char *trapped;
static int traps;

static void on_trap(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)info;
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    if (traps++ == 0) {
        CHECK(unlink(trapped) == 0);
    }
    long result = syscall(SYS_fcntl, registers[REG_RDI], registers[REG_RSI], registers[REG_RDX], OURS);
    registers[REG_RAX] = result < 0 ? -errno : result;
}

static void collector_before_the_lease(void) {
    // The name of a file with one name, of one with two, and one that is made again.
    for (int kind = 0; kind < 3; kind++) {
        pid_t child = fork();
        if (child == 0) {
            close(WORKS(shm_open("/lost", O_CREAT | O_EXCL | O_RDWR, 0600)));
            CHECK(kind != 1 || link(path_of("lost"), path_of("second")) == 0);
            trapped = path_of("lost");
            struct sigaction action = {.sa_sigaction = on_trap, .sa_flags = SA_SIGINFO};
            CHECK(sigaction(SIGSYS, &action, NULL) == 0);
            struct sock_filter code[] = {
                BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
                BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_fcntl, 0, 5),
                BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1])),
                BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, F_OFD_SETLK, 0, 3),
                BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[3])),
                BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, OURS, 1, 0),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
            };
            struct sock_fprog program = {.len = sizeof code / sizeof *code, .filter = code};
            CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
            if (kind < 2) {
                FAILS(shm_open("/lost", O_RDWR, 0), ENOENT);
            } else {
                struct stat ours, there;
                int fd = WORKS(shm_open("/lost", O_CREAT | O_RDWR, 0600));
                CHECK(fstat(fd, &ours) == 0 && stat(path_of("lost"), &there) == 0 && ours.st_ino == there.st_ino);
            }
            CHECK(traps > 0);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        unlink(path_of("second"));
        shm_unlink("/lost");
    }
}
#endif

// A file system or a sandbox that cannot rename without replacing.
static void without_rename(void) {
    pid_t child = fork();
    if (child == 0) {
        refuse(SYS_renameat2, EINVAL, 0, 0);
        CHECK(WORKS(shm_open("/renamed", O_CREAT | O_EXCL | O_RDWR, 0600)) >= 0 && mode_of("renamed") == 01660);
        FAILS(shm_open("/renamed", O_CREAT | O_EXCL | O_RDWR, 0600), EEXIST);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    WORKS(shm_unlink("/renamed"));
}

static long blocks(int fd) {
    struct stat found;
    CHECK(fstat(fd, &found) == 0);
    return found.st_blocks * 512;
}

static long size(int fd) {
    struct stat found;
    CHECK(fstat(fd, &found) == 0);
    return found.st_size;
}

static void sizes(void) {
    int fd = WORKS(shm_open("/size", O_CREAT | O_EXCL | O_RDWR, 0600));
    WORKS(ftruncate(fd, 100000));
    CHECK(size(fd) == 100000 && blocks(fd) == 102400);
    char *memory = mmap(NULL, 200000, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(memory != MAP_FAILED);
    memset(memory, 7, 100000);
    WORKS(ftruncate(fd, 5000));
    CHECK(size(fd) == 5000 && blocks(fd) == 8192);
    WORKS(ftruncate64(fd, 150000));
    CHECK(size(fd) == 150000 && blocks(fd) == 151552);
    // Zeroes where it was cut.
    CHECK(memory[4999] == 7 && memory[5000] == 0 && memory[99999] == 0);
    CHECK(posix_fallocate(fd, 0, 160000) == 0 && size(fd) == 160000);
    FAILS(ftruncate(fd, -1), EINVAL);
    int reader = WORKS(shm_open("/size", O_RDONLY, 0));
    FAILS(ftruncate(reader, 200000), EINVAL);
    FAILS(ftruncate(9999, 1), EBADF);
    // Unlinked while it is mapped.
    WORKS(shm_unlink("/size"));
    memory[0] = 9;
    CHECK(memory[0] == 9);
    FAILS(shm_unlink("/size"), ENOENT);
    FAILS(shm_open("/size", O_RDWR, 0), ENOENT);
    munmap(memory, 200000);
    close(reader);
    close(fd);
}

static void locks(void) {
    // Two processes that lock whole files, as if there were no leases.
    int fd = WORKS(open(path_of("locked"), O_CREAT | O_RDWR, 0600));
    pid_t child = fork();
    if (child == 0) {
        int own = open(path_of("locked"), O_RDWR);
        struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
        CHECK(fcntl(own, F_OFD_SETLK, &whole) == 0);
        struct flock other = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
        CHECK(fcntl(fd, F_OFD_GETLK, &other) == 0 && other.l_type == F_WRLCK && other.l_start == 0);
        other.l_pid = 0;
        FAILS(fcntl(fd, F_OFD_SETLK, &other), EAGAIN);
        whole.l_type = F_UNLCK;
        CHECK(fcntl(own, F_OFD_SETLK, &whole) == 0);
        other = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_END, .l_start = 0};
        CHECK(fcntl(fd, F_OFD_GETLK, &other) == 0 && other.l_type == F_UNLCK && other.l_whence == SEEK_END && other.l_len == 0);
        CHECK(lockf(own, F_LOCK, 0) == 0 && lockf(own, F_TEST, 0) == 0 && lockf(own, F_ULOCK, 0) == 0);
        CHECK(fcntl(own, F_SETLKW, &(struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 3}) == 0);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    // Our lease is still there: unlocking everything does not touch it.
    CHECK(fcntl(fd, F_OFD_SETLK, &(struct flock){.l_type = F_UNLCK, .l_whence = SEEK_SET}) == 0);
    int other = open(path_of("locked"), O_RDWR);
    struct flock lease = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 1L << 62, .l_len = 1};
    close(other);
    CHECK(fcntl(fd, F_GETLK, &lease) == 0 && lease.l_type == F_RDLCK);
    unlink(path_of("locked"));
    close(fd);
}

static void semaphores(void) {
    FAILS(sem_open("/sem", 0) == SEM_FAILED ? -1 : 0, ENOENT);
    sem_t *one = sem_open("/sem", O_CREAT | O_EXCL, 0600, 2);
    CHECK(one != SEM_FAILED && mode_of("sem.sem") == 01660);
    FAILS(sem_open("/sem", O_CREAT | O_EXCL, 0600, 2) == SEM_FAILED ? -1 : 0, EEXIST);
    FAILS(sem_open("/other", O_CREAT, 0600, 1U << 31) == SEM_FAILED ? -1 : 0, EINVAL);
    sem_t *same = sem_open("sem", O_CREAT, 0600, 5);
    int value;
    CHECK(same == one && sem_getvalue(one, &value) == 0 && value == 2);
    pid_t child = fork();
    if (child == 0) {
        CHECK(sem_wait(one) == 0 && sem_wait(one) == 0 && sem_trywait(one) == -1 && errno == EAGAIN);
        CHECK(sem_post(one) == 0);
        // The child has both, and closes its own.
        CHECK(sem_close(same) == 0 && sem_close(one) == 0);
        FAILS(sem_close(one), EINVAL);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(sem_getvalue(one, &value) == 0 && value == 1);
    WORKS(sem_unlink("/sem"));
    FAILS(sem_unlink("/sem"), ENOENT);
    sem_t *new = sem_open("/sem", O_CREAT, 0600, 9);
    CHECK(new != SEM_FAILED && new != one && sem_getvalue(new, &value) == 0 && value == 9);
    CHECK(sem_close(one) == 0 && sem_close(one) == 0 && sem_close(new) == 0);
    close(WORKS(open(path_of("sem.short"), O_CREAT | O_RDWR, 0600)));
    FAILS(sem_open("/short", 0) == SEM_FAILED ? -1 : 0, EINVAL);
    sem_unlink("/short");
    sem_unlink("/sem");
}

// Eight processes that create one name: one of them does, and all others open what it made.
static void races(void) {
    int gate[2], winners[2];
    CHECK(pipe(gate) == 0 && pipe(winners) == 0);
    for (int i = 0; i < 8; i++) {
        if (fork() == 0) {
            char byte;
            close(gate[1]);
            CHECK(read(gate[0], &byte, 1) == 0);
            for (int round = 0; round < 50; round++) {
                char name[32];
                snprintf(name, sizeof name, "/race-%d", round);
                int fd = shm_open(name, O_CREAT | O_EXCL | O_RDWR, 0600);
                if (fd >= 0) {
                    CHECK(write(winners[1], "w", 1) == 1);
                } else {
                    CHECK(errno == EEXIST);
                    fd = shm_open(name, O_CREAT | O_RDWR, 0600);
                    CHECK(fd >= 0);
                }
                struct stat ours, there;
                CHECK(fstat(fd, &ours) == 0 && stat(path_of(name + 1), &there) == 0 && ours.st_ino == there.st_ino);
            }
            _exit(0);
        }
    }
    close(gate[0]);
    close(gate[1]);
    for (int i = 0; i < 8; i++) {
        int status;
        CHECK(wait(&status) > 0 && status == 0);
    }
    close(winners[1]);
    char bytes[1000];
    CHECK(read(winners[0], bytes, sizeof bytes) == 50);
    for (int round = 0; round < 50; round++) {
        char name[32];
        snprintf(name, sizeof name, "/race-%d", round);
        WORKS(shm_unlink(name));
    }
    close(winners[0]);
}

// Processes that fork while other threads open and close semaphores and segments.
static volatile int done;

static void *opener(void *argument) {
    char name[32];
    snprintf(name, sizeof name, "/storm-%d", (int)(intptr_t)argument);
    while (!done) {
        sem_t *semaphore = sem_open(name, O_CREAT, 0600, 1);
        CHECK(semaphore != SEM_FAILED && sem_close(semaphore) == 0);
        int fd = shm_open(name, O_CREAT | O_RDWR, 0600);
        CHECK(fd >= 0 && close(fd) == 0);
    }
    return NULL;
}

#include <pthread.h>

static void fork_storm(void) {
    pthread_t threads[2];
    for (intptr_t i = 0; i < 2; i++) {
        CHECK(pthread_create(&threads[i], NULL, opener, (void *)i) == 0);
    }
    for (int i = 0; i < 100; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            sem_t *semaphore = sem_open("/child", O_CREAT, 0600, 1);
            CHECK(semaphore != SEM_FAILED && sem_close(semaphore) == 0);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    done = 1;
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], NULL);
    }
    for (const char **name = (const char *[]){"/storm-0", "/storm-1", "/child", NULL}; *name; name++) {
        shm_unlink(*name);
        CHECK(sem_unlink(*name) == 0);
    }
}

int main(void) {
    alarm(300);
    modes();
    templates();
    other_paths();
    other_ways();
    slow_collector();
#ifdef __x86_64__
    collector_before_the_lease();
#endif
    without_rename();
    sizes();
    locks();
    semaphores();
    races();
    fork_storm();
    return 0;
}
