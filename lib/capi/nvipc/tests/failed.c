/* A create that fails leaves the IPC directory as it was. With an argument, the GPU has no memory for the device pools. */
#include "check.h"

#include <dirent.h>

/* The sorted names in the IPC directory. */
static void list(char *names, size_t room)
{
    struct dirent **entries;
    int count = scandir(getenv("SHMESH_DIR"), &entries, NULL, alphasort);
    CHECK(count >= 0);
    names[0] = 0;
    for (int i = 0; i < count; i++) {
        CHECK(strlen(names) + strlen(entries[i]->d_name) + 2 <= room);
        strcat(strcat(names, entries[i]->d_name), "\n");
        free(entries[i]);
    }
    free(entries);
}

static void fails(nv_ipc_config_t cfg)
{
    char before[4096], after[4096];
    list(before, sizeof(before));
    CHECK(create_nv_ipc_interface(&cfg) == NULL);
    list(after, sizeof(after));
    if (strcmp(before, after) != 0)
        fprintf(stderr, "before:\n%safter:\n%s", before, after);
    CHECK(strcmp(before, after) == 0);
}

int main(int argc, char **argv)
{
    (void)argv;
    begin();
    nv_ipc_config_t cfg = small("failed", NV_IPC_MODULE_PRIMARY);
    nv_ipc_mempool_size_t *size = cfg.transport_config.shm.mempool_size;
    if (argc > 1) {
        cfg.transport_config.shm.cuda_device_id = 0;
        size[NV_IPC_MEMPOOL_CUDA_DATA] = (nv_ipc_mempool_size_t){4000, 4};
        fails(cfg);
        return 0;
    }
    /* More than any file system has. */
    size[NV_IPC_MEMPOOL_CPU_LARGE] = (nv_ipc_mempool_size_t){1 << 24, 60000};
    fails(cfg);
    /* Refused once the link exists. */
    cfg = small("failed", NV_IPC_MODULE_PRIMARY);
    size[NV_IPC_MEMPOOL_CPU_MSG].buf_size = 8;
    fails(cfg);
    setenv("SHMESH_NVIPC_TIMEOUT_S", "0.01", 1);
    fails(small("failed", NV_IPC_MODULE_SECONDARY));
    /* A second primary, with other sizes. */
    nv_ipc_t *phy = opened("failed", NV_IPC_MODULE_PRIMARY);
    cfg = small("failed", NV_IPC_MODULE_PRIMARY);
    size[NV_IPC_MEMPOOL_CPU_MSG].pool_len *= 2;
    fails(cfg);
    CHECK(phy->ipc_destroy(phy) == 0);
    return 0;
}
