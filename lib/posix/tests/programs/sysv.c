// System V segments in one process and its children.
#include "check.h"

static struct shmid_ds state(int id) {
    struct shmid_ds state;
    CHECK(shmctl(id, IPC_STAT, &state) == 0);
    return state;
}

static void keys(void) {
    key_t key = 0x5EED0042;
    FAILS(shmget(key, 100, 0600), ENOENT);
    FAILS(shmget(key, 0, IPC_CREAT | 0600), EINVAL);
    int id = WORKS(shmget(key, 5000, IPC_CREAT | IPC_EXCL | 0640));
    CHECK(mode_of("sysv.5eed0042") == 01660);
    FAILS(shmget(key, 5000, IPC_CREAT | IPC_EXCL | 0600), EEXIST);
    FAILS(shmget(key, 5001, 0600), EINVAL);
    CHECK(WORKS(shmget(key, 0, 0)) == id && WORKS(shmget(key, 4999, IPC_CREAT | 0600)) == id);
    struct shmid_ds before = state(id);
    CHECK(before.shm_segsz == 5000 && before.shm_nattch == 0 && before.shm_cpid == getpid() && before.shm_lpid == 0);
    CHECK(before.shm_perm.__key == key && before.shm_perm.mode == 0640 && before.shm_perm.uid == geteuid());
    CHECK(before.shm_atime == 0 && before.shm_dtime == 0 && before.shm_ctime > 1600000000);

    char *memory = WORKS(shmat(id, NULL, 0));
    for (int i = 0; i < 5000; i++) {
        CHECK(memory[i] == 0);
    }
    strcpy(memory, "hello");
    const char *reader = WORKS(shmat(id, NULL, SHM_RDONLY));
    CHECK(strcmp(reader, "hello") == 0 && reader != memory);
    struct shmid_ds now = state(id);
    CHECK(now.shm_nattch == 2 && now.shm_atime >= before.shm_ctime && now.shm_lpid == getpid());

    // A child has the attachments, the identifier, and may write; it may not write what is attached for reading.
    pid_t child = fork();
    if (child == 0) {
        CHECK(memory[0] == 'h' && shmdt(memory) == 0);
        FAILS(shmdt(memory), EINVAL);
        char *own = shmat(id, NULL, 0);
        CHECK(own != (char *)-1 && state(id).shm_nattch == 3);
        own[0] = 'j';
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0 && reader[0] == 'j');
    child = fork();
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        *(volatile char *)reader = 1;
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    CHECK(state(id).shm_nattch == 2);

    // Addresses.
    FAILS(shmat(id, memory + 1, 0), EINVAL);
    FAILS(shmat(id, memory, 0), EINVAL);
    char *hole = mmap(NULL, 1 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    munmap(hole, 1 << 20);
    CHECK(WORKS(shmat(id, hole + 12345, SHM_RND)) == hole + 12288);
    CHECK(strcmp(hole + 12288, "jello") == 0);
    CHECK(WORKS(shmat(id, hole + 12288, SHM_REMAP)) == hole + 12288);
    FAILS(shmat(id, NULL, SHM_REMAP), EINVAL);
    WORKS(shmdt(hole + 12288));
    shmdt(hole + 12288);
    FAILS(shmdt(hole + 12288), EINVAL);

    // Set.
    struct shmid_ds wanted = state(id);
    wanted.shm_perm.mode = 0600;
    WORKS(shmctl(id, IPC_SET, &wanted));
    CHECK(state(id).shm_perm.mode == 0600 && mode_of("sysv.5eed0042") == 01660);

    // Removed: the key is free at once, the segment stays until the last detaches.
    WORKS(shmctl(id, IPC_RMID, NULL));
    CHECK(!exists("sysv.5eed0042") && (state(id).shm_perm.mode & 01000) && state(id).shm_perm.__key == IPC_PRIVATE);
    FAILS(shmget(key, 0, 0), ENOENT);
    int other = WORKS(shmget(key, 10, IPC_CREAT | 0600));
    CHECK(other != id);
    char *late = WORKS(shmat(id, NULL, 0));
    CHECK(strcmp(late, "jello") == 0);
    WORKS(shmctl(id, IPC_RMID, NULL));
    WORKS(shmdt(late));
    WORKS(shmdt(memory));
    CHECK(strcmp(reader, "jello") == 0 && state(id).shm_nattch == 1);
    WORKS(shmdt(reader));
    FAILS(shmctl(id, IPC_STAT, &now), EINVAL);
    FAILS(shmat(id, NULL, 0), EINVAL);
    WORKS(shmctl(other, IPC_RMID, NULL));
    FAILS(shmctl(other, IPC_RMID, NULL), EINVAL);
}

static void private_segments(void) {
    int one = WORKS(shmget(IPC_PRIVATE, 1, 0600)), two = WORKS(shmget(IPC_PRIVATE, 1, IPC_CREAT | 0600));
    CHECK(one != two && state(one).shm_perm.__key == IPC_PRIVATE);
    char *memory = WORKS(shmat(one, NULL, 0));
    // The idiom of programs that want nothing left behind.
    WORKS(shmctl(one, IPC_RMID, NULL));
    pid_t child = fork();
    if (child == 0) {
        char *own = shmat(one, NULL, 0);
        CHECK(own != (char *)-1);
        own[0] = 7;
        exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0 && memory[0] == 7);
    FAILS(shmctl(two, 99, NULL), EINVAL);
    FAILS(shmctl(two, IPC_STAT, NULL), EFAULT);
    FAILS(shmctl(123456789, IPC_STAT, NULL) == -1 ? -1 : 0, EFAULT);
    WORKS(shmctl(two, IPC_RMID, NULL));
    // `one` goes when this process ends, without shmdt.
}

static void lists(void) {
    int ids[3];
    for (int i = 0; i < 3; i++) {
        ids[i] = WORKS(shmget(IPC_PRIVATE, 4096 * (i + 1), 0600));
    }
    struct shm_info info;
    int highest = shmctl(0, SHM_INFO, (struct shmid_ds *)&info), found = 0;
    CHECK(highest == info.used_ids - 1 && info.used_ids == 4 && info.shm_tot == 1 + 1 + 2 + 3);
    for (int i = 0; i <= highest; i++) {
        struct shmid_ds state;
        int id = shmctl(i, SHM_STAT, &state);
        CHECK(id >= 0);
        for (int j = 0; j < 3; j++) {
            found += id == ids[j] && state.shm_segsz == 4096UL * (j + 1);
        }
    }
    CHECK(found == 3);
    struct shminfo limits;
    CHECK(shmctl(0, IPC_INFO, (struct shmid_ds *)&limits) >= 0 && limits.shmmin == 1 && limits.shmmax > 1 << 30);
    for (int i = 0; i < 3; i++) {
        WORKS(shmctl(ids[i], IPC_RMID, NULL));
    }
}

// Another user's file has the name that a removed segment gets.
static void taken_names(void) {
    int id = WORKS(shmget(0x5EED0077, 4096, IPC_CREAT | IPC_EXCL | 0600));
    char *memory = WORKS(shmat(id, NULL, 0));
    struct stat found;
    CHECK(stat(path_of("sysv.5eed0077"), &found) == 0);
    char name[64];
    snprintf(name, sizeof name, "sysv.removed.%016lx", (unsigned long)found.st_ino);
    close(WORKS(open(path_of(name), O_CREAT | O_WRONLY, 0600)));
    WORKS(shmctl(id, IPC_RMID, NULL));
    CHECK(!exists("sysv.5eed0077") && (state(id).shm_perm.mode & 01000));
    WORKS(shmctl(id, IPC_RMID, NULL));
    strcpy(memory, "still here");
    WORKS(shmdt(memory));
    struct shmid_ds gone;
    FAILS(shmctl(id, IPC_STAT, &gone), EINVAL);
    CHECK(unlink(path_of(name)) == 0);
}

int main(void) {
    alarm(300);
    keys();
    taken_names();
    private_segments();
    lists();
    return 0;
}
