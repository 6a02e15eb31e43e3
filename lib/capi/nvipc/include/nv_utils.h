/* Threads and paths, for NVIPC's programs. In libnvipc.so and libnvlog.so. All return -1 if it is refused. */
#ifndef NV_UTILS_H_INCLUDED_
#define NV_UTILS_H_INCLUDED_

#if defined(__cplusplus)
extern "C" {
#endif

/* A path relative to the folder of this program, into at least 4096 bytes. Its length. */
int nv_get_absolute_path(char *absolute_path, const char *relative_path);

/* SCHED_FIFO with this priority, for the thread that calls; 0. */
int nv_set_sched_fifo_priority(int priority);

/* The thread that calls runs on this core alone; 0. */
int nv_assign_thread_cpu_core(int cpu_id);

#if defined(__cplusplus)
}
#endif

#endif
