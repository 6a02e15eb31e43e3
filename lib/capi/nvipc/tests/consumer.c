/* A typical NVIPC program, which only includes NVIPC's headers. It exchanges messages with its own fork. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <sys/wait.h>

#include "array_queue.h"
#include "nv_ipc.h"
#include "nv_ipc_cuda_utils.h"
#include "nv_ipc_cudapool.h"
#include "nv_ipc_debug.h"
#include "nv_ipc_efd.h"
#include "nv_ipc_epoll.h"
#include "nv_ipc_forward.h"
#include "nv_ipc_mempool.h"
#include "nv_ipc_ring.h"
#include "nv_ipc_sem.h"
#include "nv_ipc_shm.h"
#include "nv_ipc_utils.h"
#include "nv_utils.h"
#include "nvlog.h"
#include "stat_log.h"

#define TAG (NVLOG_TAG_BASE_NVIPC + 28)
#define CHECK(so)                                                                                    \
    do {                                                                                             \
        if (!(so)) {                                                                                 \
            NVLOGE_NO(TAG, AERIAL_NVIPC_API_EVENT, "%s:%d: failed: %s", __FILE__, __LINE__, #so);    \
            _exit(1);                                                                                \
        }                                                                                            \
    } while (0)

typedef struct
{
    int32_t id;
    char text[12];
} object_t;

static void a_queue_keeps_its_order(void)
{
    int32_t length = 8;
    nv_ipc_shm_t *shm = nv_ipc_shm_open(1, "consumer_queue", (size_t)ARRAY_QUEUE_HEADER_SIZE(length));
    CHECK(shm != NULL && shm->get_size(shm) == 96);
    array_queue_t *first = array_queue_open(1, "first", shm->get_mapped_addr(shm), length);
    array_queue_t *second = array_queue_open(0, "second", shm->get_mapped_addr(shm), length);
    CHECK(first != NULL && second != NULL && second->get_length(second) == 8 && second->get_max_length(first) == 8);
    CHECK(strcmp(first->get_name(first), "first") == 0 && first->dequeue(first) == -1);
    CHECK(first->enqueue(first, 5) == 0 && second->enqueue(second, 3) == 0 && first->enqueue(first, 5) < 0);
    CHECK(first->enqueue(first, 8) < 0 && first->enqueue(first, -1) < 0 && first->get_count(second) == 2);
    CHECK(first->get_next(first, -1) == 5 && first->get_next(first, 5) == 3 && first->get_next(first, 3) == -1);
    CHECK(second->dequeue(second) == 5 && array_queue_reset(first) == 0 && second->dequeue(second) == -1);
    CHECK(first->close(first) == 0 && second->close(second) == 0 && shm->close(shm) == 0);
    CHECK(nv_ipc_shm_open(0, "consumer_queue", 0) == NULL);
}

static void a_ring_copies(ring_type_t type)
{
    nv_ipc_ring_t *ring = nv_ipc_ring_open(type, "consumer_ring", 2, sizeof(object_t));
    nv_ipc_ring_t *other = type == RING_TYPE_SHM_PRIMARY
                               ? nv_ipc_ring_open(RING_TYPE_SHM_SECONDARY, "consumer_ring", 2, sizeof(object_t))
                               : ring;
    CHECK(ring != NULL && other != NULL);
    object_t object = {7, "seven"}, read = {0, ""};
    CHECK(ring->enqueue(ring, &object) == 0 && ring->enqueue(ring, &object) == 0 && ring->enqueue(ring, &object) < 0);
    CHECK(ring->get_count(ring) == 2 && ring->get_free_count(ring) == 0 && ring->get_ring_len(ring) == 2);
    CHECK(other->dequeue(other, &read) == 0 && read.id == 7 && strcmp(read.text, "seven") == 0);
    int32_t index = other->dequeue_by_index(other);
    CHECK(index >= 0 && other->get_index(other, other->get_addr(other, index)) == index);
    CHECK(other->free(other, index) == 0 && other->dequeue(other, &read) < 0);
    CHECK(ring->get_addr(ring, 2) == NULL && ring->get_buf_size(ring) == (int)sizeof(object_t));
    CHECK((other == ring || other->close(other) == 0) && ring->close(ring) == 0);
}

static void a_pool_gives_each_buffer_once(void)
{
    nv_ipc_mempool_t *pool = nv_ipc_mempool_open(1, "consumer_pool", 100, 3, -1);
    CHECK(pool != NULL && pool->get_free_count(pool) == 3 && pool->get_pool_len(pool) == 3 && pool->get_buf_size(pool) == 100);
    int32_t a = pool->alloc(pool), b = pool->alloc(pool), c = pool->alloc(pool);
    CHECK(a != b && b != c && a != c && pool->alloc(pool) == -1 && pool->get_addr(pool, -1) == NULL);
    char *at = pool->get_addr(pool, b);
    CHECK(pool->get_index(pool, at) == b && pool->memcpy_to_device(pool, at, "text", 5) == 0 && strcmp(at, "text") == 0);
    CHECK(pool->memcpy_to_host(pool, at, "text", 101) < 0);
    CHECK(pool->free(pool, b) == 0 && pool->free(pool, b) < 0 && pool->alloc(pool) == b);
    CHECK(nv_ipc_mempool_reset(pool) == 0 && pool->get_free_count(pool) == 3 && pool->close(pool) == 0);
}

static int yields;

/* In place of the C library's, also for the libraries. */
int sched_yield(void)
{
    yields++;
    return 0;
}

static void polls_yield(void)
{
    nv_ipc_ring_t *ring = nv_ipc_ring_open(RING_TYPE_APP_INTERNAL, NULL, 1, sizeof(int));
    int value = 1;
    CHECK(ring != NULL);
    for (int i = 0; i < 1000; i++)
        CHECK(ring->dequeue(ring, &value) != 0);
    CHECK(yields >= 1 && ring->enqueue(ring, &value) == 0);
    yields = 0;
    for (int i = 0; i < 1000; i++)
        CHECK(ring->enqueue(ring, &value) != 0);
    CHECK(yields >= 1 && ring->close(ring) == 0);
}

static void values_are_counted(void)
{
    stat_log_t *stat = stat_log_open("values", STAT_MODE_COUNTER, 3);
    CHECK(stat != NULL && stat->set_limit(stat, 2, 3) == 0 && stat->set_log_level(stat, NVLOG_DEBUG) == 0);
    CHECK(stat->add(stat, 1) == 0 && stat->add(stat, 5) == 0);
    CHECK(stat->get_counter(stat) == 2 && stat->get_min_value(stat) == 1 && stat->get_max_value(stat) == 5);
    CHECK(stat->get_avg_value(stat) == 3 && stat->add(stat, 3) == 1 && stat->get_counter(stat) == 0);
    CHECK(stat->time_interval(stat) == 0 && stat->get_counter(stat) == 0 && stat->time_interval(stat) == 0);
    CHECK(stat->get_counter(stat) == 1 && stat->get_min_value(stat) >= 0 && stat->close(stat) == 0);
    struct timespec before, after;
    nvlog_gettime(&before);
    nvlog_gettime(&after);
    CHECK(assert_time_order(before, after) == 1 && assert_time_order(after, after) == 1 && nvlog_timespec_interval(&before, &after) >= 0);
    nvlog_timespec_add(&after, 2000000000);
    CHECK(assert_time_order(after, before) == 0);
}

static void lines_go_to_a_file(const char *dir)
{
    char path[4096], text[512] = "", now[NVLOG_TIME_STRING_LEN];
    snprintf(path, sizeof(path), "%s/consumer.log", dir);
    nvlog_c_init(path);
    nvlog_set_log_level(NVLOG_INFO);
    NVLOGI(TAG, "%d and %s", 1, "two");
    NVLOGD(TAG, "below the level");
    nvlog_set_log_level(NVLOG_CONSOLE);
    nvlog_c_close();
    FILE *file = fopen(path, "r");
    CHECK(file != NULL && fread(text, 1, sizeof(text) - 1, file) > 0 && fclose(file) == 0);
    CHECK(strstr(text, "1 and two\n") != NULL && strstr(text, "below") == NULL);
    nvlog_gettimeofday_string(now, sizeof(now));
    CHECK(strlen(now) == 15 && now[8] == '.');
    CHECK(strcmp(nvlog_strerror(AERIAL_NVIPC_API_EVENT), "AERIAL_NVIPC_API_EVENT") == 0);
    char cut[4];
    CHECK(strcmp(nvlog_safe_strncpy(cut, "longer", sizeof(cut)), "lon") == 0);
    CHECK(nv_get_absolute_path(path, "./a/../b") > 0 && strstr(path, "/a/../b") != NULL && path[0] == '/');
}

static nv_ipc_t *open_link(nv_ipc_module_t side)
{
    nv_ipc_config_t cfg;
    cfg.ipc_transport = NV_IPC_TRANSPORT_SHM;
    CHECK(set_nv_ipc_default_config(&cfg, side) == 0);
    cfg.module_type = side;
    nvlog_safe_strncpy(cfg.transport_config.shm.prefix, "consumer", NV_NAME_MAX_LEN);
    memset(cfg.transport_config.shm.mempool_size, 0, sizeof(cfg.transport_config.shm.mempool_size));
    cfg.transport_config.shm.mempool_size[NV_IPC_MEMPOOL_CPU_MSG] = (nv_ipc_mempool_size_t){512, 8};
    return create_nv_ipc_interface(&cfg);
}

static void secondary(void)
{
    alarm(300);
    nv_ipc_sem_t *sem = nv_ipc_sem_open(0, "consumer");
    nv_ipc_t *ipc = open_link(NV_IPC_MODULE_SECONDARY);
    CHECK(sem != NULL && ipc != NULL);
    nv_ipc_msg_t msg = {.msg_id = 0x82, .data_pool = -1, .msg_len = 12};
    CHECK(ipc->tx_allocate(ipc, &msg, 0) == 0);
    memset(msg.msg_buf, 0, 12);
    ((sfn_slot_t *)msg.msg_buf)[2].u16.sfn = 99;
    CHECK(ipc->tx_send_msg(ipc, &msg) == 0 && ipc->tx_tti_sem_post(ipc) == 0);
    CHECK(sem->sem_wait(sem) == 0 && ipc->ipc_destroy(ipc) == 0 && sem->close(sem) == 0);
    _exit(0);
}

static void a_link_and_its_wait(void)
{
    nv_ipc_sem_t *sem = nv_ipc_sem_open(1, "consumer");
    nv_ipc_efd_t *efd = nv_ipc_efd_open(1, "consumer");
    CHECK(sem != NULL && efd != NULL && efd->get_fd(efd) >= 0 && efd->close(efd) == 0);
    pid_t child = fork();
    if (child == 0)
        secondary();
    nv_ipc_t *ipc = open_link(NV_IPC_MODULE_PRIMARY);
    CHECK(child > 0 && ipc != NULL);
    nv_ipc_epoll_t *epoll = ipc_epoll_create(1, ipc->get_fd(ipc));
    CHECK(epoll != NULL && ipc_epoll_wait(epoll) == 0 && ipc->get_value(ipc) == 1);
    nv_ipc_msg_t msg;
    CHECK(ipc->rx_recv_msg(ipc, &msg) == 0 && nv_ipc_get_sfn_slot(&msg).u16.sfn == 99 && !is_device_pointer(msg.msg_buf));
    int value = -1, status = -1;
    CHECK(ipc->rx_release(ipc, &msg) == 0 && ipc_epoll_destroy(epoll) == 0);
    CHECK(sem->get_value(sem, &value) == 0 && value == 0 && sem->sem_post(sem) == 0);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK(ipc->ipc_destroy(ipc) == 0 && sem->close(sem) == 0);
}

int main(int argc, char **argv)
{
    CHECK(argc == 2);
    alarm(300);
    a_queue_keeps_its_order();
    a_ring_copies(RING_TYPE_SHM_PRIMARY);
    a_ring_copies(RING_TYPE_APP_INTERNAL);
    a_pool_gives_each_buffer_once();
    polls_yield();
    values_are_counted();
    lines_go_to_a_file(argv[1]);
    a_link_and_its_wait();
    return 0;
}
