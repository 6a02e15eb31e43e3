// Fills memory until there is no more: with the library an error at ftruncate, fallocate or shmget, without it a bus error.
#include "check.h"

// The limit is a few bytes above this size: another page would be too much. What is refused was never there, not even for a moment,
// because another process might have mapped it.
static int edge(long bytes) {
    int fd = shm_open("/room", O_CREAT | O_EXCL | O_RDWR, 0600);
    CHECK(fd >= 0 && ftruncate(fd, bytes) == 0);
    struct stat before, after;
    CHECK(fstat(fd, &before) == 0);
    usleep(20000);
    FAILS(ftruncate(fd, bytes + 1), ENOSPC);
    CHECK(fstat(fd, &after) == 0 && after.st_size == bytes && after.st_ctim.tv_nsec == before.st_ctim.tv_nsec);
    puts("untouched");
    return shm_unlink("/room");
}

static void has(int fd, long size, long bytes) {
    struct stat found;
    CHECK(fstat(fd, &found) == 0 && found.st_size == size && found.st_blocks * 512 == bytes);
}

// The limit is a number of pages. What is refused was never there; pages that the file has need no room.
static int allocate(long limit) {
    int keep = FALLOC_FL_KEEP_SIZE, fd = shm_open("/room", O_CREAT | O_EXCL | O_RDWR, 0600);
    CHECK(fd >= 0);
    WORKS(fallocate(fd, 0, 0, 65536));
    errno = 77;
    CHECK(posix_fallocate(fd, 65536, 65536) == 0);
    FAILS(fallocate(fd, 0, 0, limit + 1), ENOSPC);
    FAILS(fallocate(fd, keep, 0, 1L << 40), ENOSPC);
    FAILS(fallocate64(fd, 0, 65536, limit), ENOSPC);
    errno = 77;
    CHECK(posix_fallocate(fd, limit, 131072) == 0);
    has(fd, limit + 131072, 262144);
    CHECK(posix_fallocate(fd, 0, limit + 1) == ENOSPC && posix_fallocate64(fd, 0, 1L << 40) == ENOSPC && errno == 77);
    has(fd, limit + 131072, 262144);
    CHECK(ftruncate(fd, 131072) == 0);
    WORKS(fallocate(fd, 0, 0, limit));
    has(fd, limit, limit);
    // Nothing is left, and nothing is needed.
    WORKS(fallocate(fd, 0, 0, limit));
    WORKS(fallocate(fd, keep, 100, 5000));
    errno = 77;
    CHECK(posix_fallocate(fd, limit - 1, 1) == 0 && posix_fallocate(fd, limit, 1) == ENOSPC);
    FAILS(ftruncate(fd, limit + 1), ENOSPC);
    // A hole makes room, once.
    WORKS(fallocate(fd, keep | FALLOC_FL_PUNCH_HOLE, 0, 65536));
    has(fd, limit, limit - 65536);
    FAILS(fallocate(fd, 0, limit, 65537), ENOSPC);
    WORKS(fallocate(fd, 0, 0, 65536));
    has(fd, limit, limit);
    // Pages behind the end are there already when the file grows.
    CHECK(ftruncate(fd, 4096) == 0);
    WORKS(fallocate(fd, keep, 0, limit));
    has(fd, 4096, limit);
    WORKS(fallocate(fd, keep, 0, limit));
    CHECK(ftruncate(fd, limit) == 0);
    has(fd, limit, limit);
    FAILS(ftruncate(fd, limit + 1), ENOSPC);
    // Errors of the kernel, and memory elsewhere.
    FAILS(fallocate(fd, 0, -1, 1), EINVAL);
    FAILS(fallocate(fd, 0, 0, 0), EINVAL);
    FAILS(fallocate(fd, 0, INT64_MAX, INT64_MAX), EFBIG);
    FAILS(fallocate(9999, 0, 0, 1), EBADF);
    CHECK(posix_fallocate(9999, 0, 1) == EBADF);
    int other = WORKS(memfd_create("other", 0));
    WORKS(fallocate(other, 0, 0, 2 * limit));
    puts("allocated");
    return shm_unlink("/room");
}

int main(int argc, char **argv) {
    alarm(300);
    CHECK(argc == 2 || argc == 3);
    long bytes = atol(argv[1]);
    if (argc == 3) {
        return strcmp(argv[2], "edge") ? allocate(bytes) : edge(bytes);
    }
    int fd = shm_open("/room", O_CREAT | O_EXCL | O_RDWR, 0600);
    CHECK(fd >= 0 && ftruncate(fd, 65536) == 0);
    if (ftruncate(fd, bytes) != 0) {
        CHECK(errno == ENOSPC);
        struct stat found;
        CHECK(fstat(fd, &found) == 0 && found.st_size == 65536 && found.st_blocks == 128);
        // What fits is given, and shrinking makes room.
        CHECK(ftruncate(fd, 131072) == 0 && ftruncate(fd, 4096) == 0);
        FAILS(shmget(IPC_PRIVATE, bytes, 0600), ENOSPC);
        int id = shmget(IPC_PRIVATE, 65536, 0600);
        CHECK(id >= 0 && shmctl(id, IPC_RMID, NULL) == 0);
        puts("refused");
        return shm_unlink("/room");
    }
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(memory != MAP_FAILED);
    shm_unlink("/room");
    memset(memory, 1, bytes);
    puts("filled");
    return 0;
}
