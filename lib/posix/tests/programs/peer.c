// One of several processes, possibly of other users and namespaces. The first argument says which one.
#include "check.h"

static void say(const char *word) {
    puts(word);
    fflush(stdout);
}

// Until the test says so.
static int told(void) {
    char line[64];
    return fgets(line, sizeof line, stdin) != NULL;
}

static sem_t *semaphore(const char *name, int flags) {
    sem_t *opened = sem_open(name, flags, 0600, 0);
    CHECK(opened != SEM_FAILED);
    return opened;
}

static void produce(void) {
    int fd = shm_open("/batch", O_CREAT | O_EXCL | O_RDWR, 0600);
    CHECK(fd >= 0 && ftruncate(fd, 4096) == 0);
    char *memory = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(memory != MAP_FAILED);
    close(fd);
    sem_t *full = semaphore("/full", O_CREAT | O_EXCL), *empty = semaphore("/empty", O_CREAT | O_EXCL);
    strcpy(memory, "from the producer");
    say("ready");
    CHECK(sem_wait(full) == 0 && strcmp(memory, "from the consumer") == 0);
    CHECK(sem_post(empty) == 0);
    say("received");
    told();
}

static void consume(void) {
    int fd = shm_open("/batch", O_RDWR, 0);
    CHECK(fd >= 0);
    char *memory = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(memory != MAP_FAILED && strcmp(memory, "from the producer") == 0);
    sem_t *full = semaphore("/full", O_CREAT), *empty = semaphore("/empty", 0);
    strcpy(memory, "from the consumer");
    CHECK(sem_post(full) == 0 && sem_wait(empty) == 0);
    say("done");
}

static void sysv_produce(void) {
    int id = shmget(0x1234, 8192, IPC_CREAT | IPC_EXCL | 0600);
    CHECK(id >= 0);
    char *memory = shmat(id, NULL, 0);
    CHECK(memory != (char *)-1);
    strcpy(memory, "from the producer");
    printf("ready %d\n", id);
    say("");
    CHECK(told());
    CHECK(strcmp(memory, "from the consumer") == 0);
    struct shmid_ds state;
    CHECK(shmctl(id, IPC_STAT, &state) == 0);
    printf("attached %lu\n", (unsigned long)state.shm_nattch);
    CHECK(shmctl(id, IPC_RMID, NULL) == 0);
    say("removed");
    told();
}

static void sysv_consume(int id) {
    CHECK(shmget(0x1234, 0, 0) == id);
    char *memory = shmat(id, NULL, 0);
    CHECK(memory != (char *)-1 && strcmp(memory, "from the producer") == 0);
    strcpy(memory, "from the consumer");
    struct shmid_ds state;
    CHECK(shmctl(id, IPC_STAT, &state) == 0 && state.shm_nattch == 2 && state.shm_perm.cuid != geteuid());
    // Another user's.
    FAILS(shmctl(id, IPC_RMID, NULL), EPERM);
    say("done");
    told();
    CHECK(strcmp(memory, "from the consumer") == 0);
}

// Holds memory, and says whether it is what it was.
static void hold(void) {
    int fd = shm_open("/held", O_CREAT | O_EXCL | O_RDWR, 0600);
    CHECK(fd >= 0 && ftruncate(fd, 65536) == 0);
    unsigned char *memory = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(memory != MAP_FAILED);
    close(fd);
    memset(memory, 42, 65536);
    CHECK(semaphore("/held", O_CREAT | O_EXCL) != NULL);
    int id = shmget(0x42, 4096, IPC_CREAT | IPC_EXCL | 0600);
    CHECK(id >= 0);
    say("ready");
    while (told()) {
        for (int i = 0; i < 65536; i++) {
            CHECK(memory[i] == 42);
        }
        sem_t *again = semaphore("/held", 0);
        CHECK(sem_post(again) == 0 && sem_close(again) == 0 && shmget(0x42, 4096, 0) == id);
        say("intact");
    }
}

// Makes and removes everything that can be made, until it is killed.
static void churn(unsigned seed) {
    srand(seed);
    say("ready");
    for (unsigned round = 0;; round++) {
        char name[64];
        snprintf(name, sizeof name, "/churn-%d-%u", getpid(), round);
        int fd = shm_open(name, O_CREAT | O_EXCL | O_RDWR, 0600);
        CHECK(fd >= 0 && ftruncate(fd, 4096 + rand() % 65536) == 0);
        char *memory = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        CHECK(memory != MAP_FAILED);
        memory[0] = 1;
        close(fd);
        sem_t *own = sem_open(name, O_CREAT, 0600, 1);
        CHECK(own != SEM_FAILED);
        int id = shmget(rand() % 2 ? IPC_PRIVATE : rand() | 1, 5000, IPC_CREAT | 0600);
        CHECK(id >= 0);
        char *segment = shmat(id, NULL, 0);
        CHECK(segment != (char *)-1);
        segment[0] = 1;
        fd = open(path_of(name + 1), O_RDWR);
        CHECK(fd >= 0);
        close(fd);
        if (rand() % 2) {
            CHECK(shmctl(id, IPC_RMID, NULL) == 0);
        }
        if (rand() % 2) {
            CHECK(shmdt(segment) == 0);
        }
        if (rand() % 2) {
            CHECK(shm_unlink(name) == 0 && sem_unlink(name) == 0);
        }
        if (rand() % 2) {
            munmap(memory, 4096);
            CHECK(sem_close(own) == 0);
        }
    }
}

// As a server that died with its segments, of sizes from one to another: reserved, or with one page of memory each.
static void many(int count, long first, long last, int is_sparse) {
    for (int i = 0; i < count; i++) {
        char name[64];
        long bytes = first + (last - first) * i / (count - 1);
        snprintf(name, sizeof name, "/segment-%d", i);
        int fd = shm_open(name, O_CREAT | O_EXCL | O_RDWR, 0600);
        CHECK(fd >= 0 && (is_sparse ? pwrite(fd, "x", 1, bytes - 1) == 1 : ftruncate(fd, bytes) == 0));
        CHECK(mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) != MAP_FAILED);
        close(fd);
    }
    say("ready");
    told();
}

// Another user's memory: what its own files are not protected from, and what they are.
static void intrude(void) {
    FAILS(shm_open("/batch", O_CREAT | O_EXCL | O_RDWR, 0600), EEXIST);
    int fd = WORKS(shm_open("/batch", O_CREAT | O_RDWR, 0600));
    struct stat found;
    CHECK(fstat(fd, &found) == 0 && found.st_uid != geteuid());
    FAILS(fchmod(fd, 0666), EPERM);
    close(fd);
    FAILS(shm_unlink("/batch"), EACCES);
    FAILS(sem_unlink("/full"), EACCES);
    FAILS(unlink(path_of("batch")), EPERM);
    FAILS(rename(path_of("batch"), path_of("mine")), EPERM);
    say("done");
}

// A process without that memory.
static void stray(int error) {
    for (const char **name = (const char *[]){"/batch", "batch", NULL}; *name; name++) {
        FAILS(shm_open(*name, O_RDWR, 0), error);
        FAILS(shm_open(*name, O_RDONLY, 0), error);
    }
    FAILS(sem_open("/full", 0) == SEM_FAILED ? -1 : 0, error);
    FAILS(shmget(0x1234, 0, 0), error);
    say("done");
}

int main(int argc, char **argv) {
    alarm(300);
    CHECK(argc >= 2);
    const char *who = argv[1];
    if (!strcmp(who, "produce")) {
        produce();
    } else if (!strcmp(who, "consume")) {
        consume();
    } else if (!strcmp(who, "sysv-produce")) {
        sysv_produce();
    } else if (!strcmp(who, "sysv-consume")) {
        sysv_consume(atoi(argv[2]));
    } else if (!strcmp(who, "hold")) {
        hold();
    } else if (!strcmp(who, "churn")) {
        churn(atoi(argv[2]));
    } else if (!strcmp(who, "many")) {
        CHECK(argc == 6);
        many(atoi(argv[2]), atol(argv[3]), atol(argv[4]), !strcmp(argv[5], "sparse"));
    } else if (!strcmp(who, "intrude")) {
        intrude();
    } else if (!strcmp(who, "stray")) {
        stray(atoi(argv[2]));
    } else if (!strcmp(who, "create")) {
        int fd = shm_open(argv[2], O_CREAT | O_EXCL | O_RDWR, 0600);
        CHECK(fd >= 0 && ftruncate(fd, 4096) == 0 && sem_open(argv[2], O_CREAT, 0600, 1) != SEM_FAILED);
    } else {
        CHECK(!"a role");
    }
    return 0;
}
