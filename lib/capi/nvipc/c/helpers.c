/*
 * NVIPC's helpers outside of a link: mapped files, rings, pools, semaphores, epoll. Part of libnvipc.so, implemented with
 * the queue of lib/nvipc and with links.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "array_queue.h"
#include "nv_ipc_efd.h"
#include "nv_ipc_epoll.h"
#include "nv_ipc_mempool.h"
#include "nv_ipc_ring.h"
#include "nv_ipc_sem.h"
#include "nv_ipc_shm.h"
#include "nvlog.h"

#define TAG NVLOG_TAG_BASE_NVIPC
#define refuse(...) NVLOGE_NO(TAG, AERIAL_NVIPC_API_EVENT, __VA_ARGS__)

/* Writes the path of a name in the IPC directory. -1 if it is too long or leaves the directory. */
static int path_of(char *path, size_t room, const char *name)
{
    const char *dir = getenv("SHMESH_DIR");
    if (name == NULL || name[0] == '\0' || name[0] == '.' || strchr(name, '/') != NULL) {
        refuse("name \"%s\": give one without a slash", name != NULL ? name : "");
        return -1;
    }
    int len = snprintf(path, room, "%s/%s", dir != NULL && dir[0] != '\0' ? dir : "/dev/shm", name);
    return len > 0 && (size_t)len < room ? 0 : -1;
}

struct shm
{
    nv_ipc_shm_t calls;
    void *start;
    size_t size;
    int is_ours;
    char path[4096];
};

static void *shm_addr(nv_ipc_shm_t *shm)
{
    return ((struct shm *)shm)->start;
}

static size_t shm_size(nv_ipc_shm_t *shm)
{
    return ((struct shm *)shm)->size;
}

static int shm_close(nv_ipc_shm_t *calls)
{
    struct shm *shm = (struct shm *)calls;
    int done = munmap(shm->start, shm->size);
    if (shm->is_ours && unlink(shm->path) != 0)
        done = -1;
    free(shm);
    return done;
}

static int shm_map(struct shm *shm, int fd)
{
    struct stat stat;
    int error = 0;
    if (shm->is_ours)
        error = posix_fallocate(fd, 0, (off_t)shm->size);
    if (error == 0 && fstat(fd, &stat) != 0)
        error = errno;
    if (error != 0)
        return error;
    if (shm->size == 0)
        shm->size = (size_t)stat.st_size;
    if (shm->size == 0 || (size_t)stat.st_size < shm->size)
        return ENODATA;
    shm->start = mmap(NULL, shm->size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return shm->start == MAP_FAILED ? errno : 0;
}

nv_ipc_shm_t *nv_ipc_shm_open(int primary, const char *name, size_t size)
{
    struct shm *shm = calloc(1, sizeof(*shm));
    if (shm == NULL)
        return NULL;
    shm->calls = (nv_ipc_shm_t){shm_addr, shm_size, shm_close};
    shm->size = size;
    shm->is_ours = primary != 0;
    if (path_of(shm->path, sizeof(shm->path), name) != 0 || (shm->is_ours && size == 0)) {
        free(shm);
        return NULL;
    }
    /* A stale file is replaced by a new one, so that processes that still map the old one keep it. */
    if (shm->is_ours)
        unlink(shm->path);
    int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | (shm->is_ours ? O_CREAT | O_EXCL : 0);
    int fd = open(shm->path, flags, 0600);
    int error = fd < 0 ? errno : shm_map(shm, fd);
    if (fd >= 0)
        close(fd);
    if (error == 0)
        return &shm->calls;
    refuse("%s of %zu bytes: %s", shm->path, size, strerror(error));
    if (shm->is_ours && fd >= 0)
        unlink(shm->path);
    free(shm);
    return NULL;
}

/* Objects of one size in a file with this name, or in memory of this process. */
struct objects
{
    nv_ipc_shm_t *shm;
    void *own;
    char *first;
    int32_t size, len;
};

static char *objects_open(struct objects *at, int primary, int internal, const char *name, size_t head)
{
    size_t bytes = head + (size_t)at->size * (size_t)at->len;
    if (internal)
        at->own = calloc(1, bytes);
    else
        at->shm = nv_ipc_shm_open(primary, name, bytes);
    char *start = internal ? at->own : at->shm != NULL ? at->shm->get_mapped_addr(at->shm) : NULL;
    at->first = start != NULL ? start + head : NULL;
    return start;
}

static int objects_close(struct objects *at)
{
    free(at->own);
    return at->shm != NULL ? at->shm->close(at->shm) : 0;
}

static void *object(const struct objects *at, int32_t index)
{
    return index >= 0 && index < at->len ? at->first + (size_t)index * (size_t)at->size : NULL;
}

static int index_of(const struct objects *at, const void *address)
{
    uintptr_t offset = (uintptr_t)address - (uintptr_t)at->first;
    return (uintptr_t)address >= (uintptr_t)at->first && offset / (size_t)at->size < (size_t)at->len
               ? (int)(offset / (size_t)at->size)
               : -1;
}

static int are_sizes(const char *what, const char *name, int32_t size, int32_t len)
{
    if (size > 0 && len > 0)
        return 1;
    refuse("%s \"%s\": %d objects of %d bytes; give 1 or more of both", what, name != NULL ? name : "", len, size);
    return 0;
}

struct ring
{
    nv_ipc_ring_t calls;
    struct objects at;
    array_queue_t *full, *free;
};

static struct ring *ring(nv_ipc_ring_t *calls)
{
    return (struct ring *)calls;
}

static int32_t ring_alloc(nv_ipc_ring_t *r)
{
    return ring(r)->free->dequeue(ring(r)->free);
}

static int ring_free(nv_ipc_ring_t *r, int32_t index)
{
    return ring(r)->free->enqueue(ring(r)->free, index);
}

static int ring_get_index(nv_ipc_ring_t *r, void *buf)
{
    return index_of(&ring(r)->at, buf);
}

static void *ring_get_addr(nv_ipc_ring_t *r, int32_t index)
{
    return object(&ring(r)->at, index);
}

static int ring_put(nv_ipc_ring_t *r, int32_t index)
{
    return ring(r)->full->enqueue(ring(r)->full, index);
}

static int32_t ring_take(nv_ipc_ring_t *r)
{
    return ring(r)->full->dequeue(ring(r)->full);
}

static int ring_buf_size(nv_ipc_ring_t *r)
{
    return ring(r)->at.size;
}

static int ring_enqueue(nv_ipc_ring_t *r, void *obj)
{
    int32_t index = obj != NULL ? ring_alloc(r) : -1;
    void *to = ring_get_addr(r, index);
    if (to == NULL)
        return -1;
    memcpy(to, obj, (size_t)ring(r)->at.size);
    return ring_put(r, index);
}

static int ring_dequeue(nv_ipc_ring_t *r, void *obj)
{
    int32_t index = obj != NULL ? ring_take(r) : -1;
    const void *from = ring_get_addr(r, index);
    if (from == NULL)
        return -1;
    memcpy(obj, from, (size_t)ring(r)->at.size);
    return ring_free(r, index);
}

static int ring_count(nv_ipc_ring_t *r)
{
    return ring(r)->full->get_count(ring(r)->full);
}

static int ring_free_count(nv_ipc_ring_t *r)
{
    return ring(r)->free->get_count(ring(r)->free);
}

static int ring_len(nv_ipc_ring_t *r)
{
    return ring(r)->at.len;
}

static int ring_close(nv_ipc_ring_t *r)
{
    struct ring *own = ring(r);
    if (own->full != NULL)
        own->full->close(own->full);
    if (own->free != NULL)
        own->free->close(own->free);
    int done = objects_close(&own->at);
    free(own);
    return done;
}

nv_ipc_ring_t *nv_ipc_ring_open(ring_type_t type, const char *name, int32_t len, int32_t buf_size)
{
    struct ring *own = calloc(1, sizeof(*own));
    if (own == NULL || !are_sizes("ring", name, buf_size, len)) {
        free(own);
        return NULL;
    }
    own->calls = (nv_ipc_ring_t){ring_alloc, ring_free,    ring_get_index, ring_get_addr, ring_put,        ring_take, ring_buf_size,
                                 ring_enqueue, ring_dequeue, ring_close,     ring_count,    ring_free_count, ring_len};
    own->at.size = buf_size;
    own->at.len = len;
    int is_first = type != RING_TYPE_SHM_SECONDARY;
    size_t queue = (size_t)ARRAY_QUEUE_HEADER_SIZE(len);
    char *start = objects_open(&own->at, is_first, type == RING_TYPE_APP_INTERNAL, name, 2 * queue);
    if (start != NULL) {
        own->full = array_queue_open(is_first, name, start, len);
        own->free = array_queue_open(is_first, name, start + queue, len);
    }
    if (own->full == NULL || own->free == NULL) {
        ring_close(&own->calls);
        return NULL;
    }
    for (int32_t i = 0; is_first && i < len; i++)
        ring_free(&own->calls, i);
    return &own->calls;
}

struct pool
{
    nv_ipc_mempool_t calls;
    struct objects at;
    array_queue_t *free;
};

static struct pool *pool(nv_ipc_mempool_t *calls)
{
    return (struct pool *)calls;
}

static int32_t pool_alloc(nv_ipc_mempool_t *p)
{
    return pool(p)->free->dequeue(pool(p)->free);
}

static int pool_free(nv_ipc_mempool_t *p, int32_t index)
{
    return pool(p)->free->enqueue(pool(p)->free, index);
}

static int pool_get_index(nv_ipc_mempool_t *p, void *buf)
{
    return index_of(&pool(p)->at, buf);
}

static void *pool_get_addr(nv_ipc_mempool_t *p, int32_t index)
{
    return object(&pool(p)->at, index);
}

static int pool_buf_size(nv_ipc_mempool_t *p)
{
    return pool(p)->at.size;
}

static int pool_len(nv_ipc_mempool_t *p)
{
    return pool(p)->at.len;
}

static void *pool_queue(nv_ipc_mempool_t *p)
{
    return pool(p)->free;
}

static int pool_free_count(nv_ipc_mempool_t *p)
{
    return pool(p)->free->get_count(pool(p)->free);
}

static int pool_copy(nv_ipc_mempool_t *p, void *to, const void *from, size_t size)
{
    if (to == NULL || from == NULL || size > (size_t)pool(p)->at.size)
        return -1;
    memcpy(to, from, size);
    return 0;
}

static int pool_close(nv_ipc_mempool_t *p)
{
    struct pool *own = pool(p);
    if (own->free != NULL)
        own->free->close(own->free);
    int done = objects_close(&own->at);
    free(own);
    return done;
}

int nv_ipc_mempool_reset(nv_ipc_mempool_t *p)
{
    if (p == NULL || array_queue_reset(pool(p)->free) != 0)
        return -1;
    int done = 0;
    for (int32_t i = 0; i < pool(p)->at.len; i++)
        done |= pool_free(p, i);
    return done;
}

nv_ipc_mempool_t *nv_ipc_mempool_open(int primary, const char *name, int buf_size, int len, int cuda_device_id)
{
    struct pool *own = calloc(1, sizeof(*own));
    if (own == NULL || !are_sizes("pool", name, buf_size, len)) {
        free(own);
        return NULL;
    }
    if (cuda_device_id >= 0)
        NVLOGC(TAG, "pool %s: in memory of the host; only a link has device pools", name);
    own->calls = (nv_ipc_mempool_t){pool_alloc, pool_free,  pool_get_index,  pool_get_addr, pool_buf_size, pool_len,
                                    pool_close, pool_queue, pool_free_count, pool_copy,     pool_copy};
    own->at.size = buf_size;
    own->at.len = len;
    char *start = objects_open(&own->at, primary, 0, name, (size_t)ARRAY_QUEUE_HEADER_SIZE(len));
    own->free = start != NULL ? array_queue_open(primary, name, start, len) : NULL;
    if (own->free == NULL || (primary && nv_ipc_mempool_reset(&own->calls) != 0)) {
        pool_close(&own->calls);
        return NULL;
    }
    return &own->calls;
}

struct sems
{
    nv_ipc_sem_t calls;
    sem_t *theirs, *ours;
    int is_primary;
    char names[2][64];
};

static struct sems *sems(nv_ipc_sem_t *calls)
{
    return (struct sems *)calls;
}

static int sems_post(nv_ipc_sem_t *s)
{
    return sem_post(sems(s)->theirs);
}

static int sems_wait(nv_ipc_sem_t *s)
{
    int done;
    do
        done = sem_wait(sems(s)->ours);
    while (done != 0 && errno == EINTR);
    return done;
}

static int sems_value(nv_ipc_sem_t *s, int *value)
{
    return value != NULL ? sem_getvalue(sems(s)->ours, value) : -1;
}

static int sems_close(nv_ipc_sem_t *s)
{
    struct sems *own = sems(s);
    int done = sem_close(own->theirs) | sem_close(own->ours);
    for (int i = 0; own->is_primary && i < 2; i++)
        done |= sem_unlink(own->names[i]);
    free(own);
    return done != 0 ? -1 : 0;
}

nv_ipc_sem_t *nv_ipc_sem_open(int primary, const char *prefix)
{
    struct sems *own = calloc(1, sizeof(*own));
    if (own == NULL || prefix == NULL || strlen(prefix) >= NV_SEM_NAME_MAX_LEN) {
        refuse("semaphores \"%s\": give a prefix of less than %d bytes", prefix != NULL ? prefix : "", NV_SEM_NAME_MAX_LEN);
        free(own);
        return NULL;
    }
    own->calls = (nv_ipc_sem_t){sems_post, sems_wait, sems_value, sems_close};
    own->is_primary = primary != 0;
    sem_t *opened[2];
    for (int i = 0; i < 2; i++) {
        snprintf(own->names[i], sizeof(own->names[i]), "/%s_sem_%s", prefix, i == 0 ? "m2s" : "s2m");
        opened[i] = sem_open(own->names[i], O_CREAT, 0600, 0);
        if (opened[i] == SEM_FAILED) {
            refuse("semaphore %s: %s", own->names[i], strerror(errno));
            if (i == 1)
                sem_close(opened[0]);
            free(own);
            return NULL;
        }
    }
    own->theirs = opened[primary ? 0 : 1];
    own->ours = opened[primary ? 1 : 0];
    /* Posts of a process that has ended. */
    for (int i = 0; primary && i < 2; i++)
        while (sem_trywait(opened[i]) == 0) {}
    return &own->calls;
}

nv_ipc_epoll_t *ipc_epoll_create(int max_events, int target_fd)
{
    if (max_events < 1 || target_fd < 0)
        return NULL;
    nv_ipc_epoll_t *epoll = calloc(1, sizeof(*epoll) + (size_t)max_events * sizeof(struct epoll_event));
    if (epoll == NULL)
        return NULL;
    struct epoll_event event = {.events = EPOLLIN, .data.fd = target_fd};
    *epoll = (nv_ipc_epoll_t){epoll_create1(EPOLL_CLOEXEC), target_fd, max_events};
    if (epoll->epoll_fd >= 0 && epoll_ctl(epoll->epoll_fd, EPOLL_CTL_ADD, target_fd, &event) == 0)
        return epoll;
    refuse("epoll of descriptor %d: %s", target_fd, strerror(errno));
    ipc_epoll_destroy(epoll);
    return NULL;
}

int ipc_epoll_wait(nv_ipc_epoll_t *epoll)
{
    if (epoll == NULL)
        return -1;
    struct epoll_event event;
    int ready;
    do
        ready = epoll_wait(epoll->epoll_fd, &event, 1, -1);
    while (ready < 0 && errno == EINTR);
    return ready == 1 ? 0 : -1;
}

int ipc_epoll_destroy(nv_ipc_epoll_t *epoll)
{
    if (epoll == NULL)
        return -1;
    int done = epoll->epoll_fd >= 0 ? close(epoll->epoll_fd) : 0;
    free(epoll);
    return done;
}

struct efd
{
    nv_ipc_efd_t calls;
    nv_ipc_t *link;
};

static nv_ipc_t *link_of(nv_ipc_efd_t *efd)
{
    return ((struct efd *)efd)->link;
}

static int efd_fd(nv_ipc_efd_t *efd)
{
    return link_of(efd)->get_fd(link_of(efd));
}

static int efd_notify(nv_ipc_efd_t *efd, int value)
{
    return link_of(efd)->notify(link_of(efd), value);
}

static int efd_value(nv_ipc_efd_t *efd)
{
    return link_of(efd)->get_value(link_of(efd));
}

static int efd_close(nv_ipc_efd_t *efd)
{
    int done = link_of(efd)->ipc_destroy(link_of(efd));
    free(efd);
    return done;
}

nv_ipc_efd_t *nv_ipc_efd_open(int primary, const char *prefix)
{
    nv_ipc_config_t config = {.ipc_transport = NV_IPC_TRANSPORT_SHM};
    nv_ipc_module_t side = primary ? NV_IPC_MODULE_PRIMARY : NV_IPC_MODULE_SECONDARY;
    struct efd *efd = calloc(1, sizeof(*efd));
    if (efd == NULL || prefix == NULL || set_nv_ipc_default_config(&config, side) != 0) {
        free(efd);
        return NULL;
    }
    config.module_type = side;
    nv_ipc_config_shm_t *shm = &config.transport_config.shm;
    snprintf(shm->prefix, sizeof(shm->prefix), "%.27s_efd", prefix);
    memset(shm->mempool_size, 0, sizeof(shm->mempool_size));
    shm->mempool_size[NV_IPC_MEMPOOL_CPU_MSG] = (nv_ipc_mempool_size_t){64, 8};
    efd->calls = (nv_ipc_efd_t){efd_fd, efd_notify, efd_value, efd_close};
    efd->link = create_nv_ipc_interface(&config);
    if (efd->link != NULL)
        return &efd->calls;
    free(efd);
    return NULL;
}
