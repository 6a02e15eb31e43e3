// Fills memory until there is no more: with the library an error at ftruncate or shmget, without it a bus error.
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

int main(int argc, char **argv) {
    alarm(300);
    CHECK(argc == 2 || argc == 3);
    long bytes = atol(argv[1]);
    if (argc == 3) {
        return edge(bytes);
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
