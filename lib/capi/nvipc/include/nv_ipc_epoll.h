/* Waits for one descriptor, such as the result of get_fd. In libnvipc.so. */
#ifndef NV_IPC_EPOLL_H_INCLUDED_
#define NV_IPC_EPOLL_H_INCLUDED_

#include <sys/epoll.h>

#if defined(__cplusplus)
extern "C" {
#endif

/* Followed by max_events events. */
typedef struct
{
    int epoll_fd;
    int target_fd;
    int max_events;
} nv_ipc_epoll_t;

/* NULL on failure. */
nv_ipc_epoll_t *ipc_epoll_create(int max_events, int target_fd);
/* Waits until the descriptor is readable; -1 on failure. */
int ipc_epoll_wait(nv_ipc_epoll_t *ipc_epoll);
int ipc_epoll_destroy(nv_ipc_epoll_t *ipc_epoll);

#if defined(__cplusplus)
}
#endif

#endif
