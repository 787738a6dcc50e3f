// SPDX-License-Identifier: BSD-3-Clause
// The gate in front of the driver: shut while the process is locked.
#include <errno.h>
#include <time.h>
#include <unistd.h>

#include "driver.h"
#include "faults.h"

struct driver driver = {
    .mutex = PTHREAD_MUTEX_INITIALIZER,
    .changed = PTHREAD_COND_INITIALIZER,
    .connection = {-1, PTHREAD_MUTEX_INITIALIZER},
    .next_address = 0x300000000000ULL, // nothing that the processor could reach
};

CUresult gate_call(const char *function)
{
    int fault = sim_fault(function);
    return fault > 0 ? (CUresult)fault : CUDA_SUCCESS;
}

CUresult gate_enter(const char *function)
{
    if (driver.forked || !driver.initialised)
        return CUDA_ERROR_NOT_INITIALIZED;
    CUresult fault = gate_call(function);
    if (fault != CUDA_SUCCESS)
        return fault;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&driver.mutex);
    while ((driver.state != CU_PROCESS_STATE_RUNNING && driver.state != CU_PROCESS_STATE_FAILED) ||
           driver.closing)
        pthread_cond_wait(&driver.changed, &driver.mutex);
    if (driver.state == CU_PROCESS_STATE_FAILED)
        result = CUDA_ERROR_UNKNOWN;
    else
        driver.active++;
    pthread_mutex_unlock(&driver.mutex);
    return result;
}

CUresult gate_leave(CUresult result)
{
    pthread_mutex_lock(&driver.mutex);
    if (--driver.active == 0)
        pthread_cond_broadcast(&driver.changed);
    pthread_mutex_unlock(&driver.mutex);
    return (CUresult)sim_fault_after((int)result);
}

uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ULL + (uint64_t)now.tv_nsec;
}

void sleep_until(uint64_t deadline_ns)
{
    struct timespec until = {(time_t)(deadline_ns / 1000000000ULL),
                             (long)(deadline_ns % 1000000000ULL)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR) {
    }
}

CUresult wait_for_work(uint64_t deadline_ns)
{
    for (;;) {
        uint64_t left = 0;
        CUresult result = device_receive(SIM_REMAINING, -1, 0, 0, NULL, 0, &left);
        if (result != CUDA_SUCCESS || left == 0)
            return result;
        uint64_t end = now_ns() + left;
        if (deadline_ns && end > deadline_ns) {
            sleep_until(deadline_ns);
            return CUDA_ERROR_NOT_READY;
        }
        sleep_until(end);
    }
}

CUresult device_receive(enum sim_op op, int gpu, uint64_t a, uint64_t b, void *out, size_t size,
                        uint64_t *value)
{
    struct sim_request request = {.op = op, .a = a, .b = b};
    if (gpu >= 0)
        __builtin_memcpy(request.uuid, driver.machine.gpus[gpu].uuid, sizeof(request.uuid));
    return (CUresult)sim_call(&driver.connection, request, NULL, out, size, value);
}

CUresult device_send(enum sim_op op, int gpu, uint64_t a, uint64_t b, const void *data,
                     uint64_t length)
{
    struct sim_request request = {.op = op, .a = a, .b = b, .length = length};
    if (gpu >= 0)
        __builtin_memcpy(request.uuid, driver.machine.gpus[gpu].uuid, sizeof(request.uuid));
    return (CUresult)sim_call(&driver.connection, request, data, NULL, 0, NULL);
}

CUresult device_call(enum sim_op op, int gpu, uint64_t a, uint64_t b, uint64_t c)
{
    struct sim_request request = {.op = op, .a = a, .b = b, .c = c};
    if (gpu >= 0)
        __builtin_memcpy(request.uuid, driver.machine.gpus[gpu].uuid, sizeof(request.uuid));
    return (CUresult)sim_call(&driver.connection, request, NULL, NULL, 0, NULL);
}
