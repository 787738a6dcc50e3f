/* SPDX-License-Identifier: BSD-3-Clause */
#include "fake_driver.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "cuda_helper.h"
#include "io.h"

struct fake *fake;

void fake_make(void)
{
    fake = mmap(NULL, sizeof(*fake), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(fake != MAP_FAILED);
}

void fake_reset(void)
{
    memset(fake, 0, sizeof(*fake));
    for (int i = 0; i < PROCESSES; i++)
        fake->pid[i] = FIRST + i;
}

void fake_fail(char letter, size_t at, int times, int with)
{
    fake->fail = letter;
    fake->at = at;
    fake->times = times;
    fake->with = with;
    fake->then = CUDA_SUCCESS;
}

size_t fake_find(int pid)
{
    for (size_t i = 0; i < PROCESSES; i++)
        if (fake->pid[i] == pid)
            return i;
    return PROCESSES;
}

/* A driver that has written over the helper's memory: whatever comes to the program then. */
static void write_to_caller(int pid)
{
    static const double nonsense[] = {NAN, -INFINITY, INFINITY, -1.0, 0.0};
    enum { SOCKET = 3 };
    struct cuda_message message = {.op = CUDA_OP_LOCK, .pid = pid, .limit = 50.0};
    size_t length = sizeof(message);
    if (fake->with == NONSENSE)
        message.limit = nonsense[fake->slow_ms % 5];
    if (fake->with == SHORT)
        length--;
    do
        send(SOCKET, &message, length, MSG_NOSIGNAL);
    while (fake->with == FLOOD);
    for (;;)
        pause();
}

static int call(char letter, int pid)
{
    size_t at = fake_find(pid);
    if (at == PROCESSES)
        return CUDA_ERROR_INVALID_VALUE;
    if (letter != 'S') {
        CHECK(fake->count + 3 < CALLS);
        fake->calls[fake->count++] = letter;
        fake->calls[fake->count++] = (char)('0' + at);
        fake->calls[fake->count++] = ' ';
        fake->calls[fake->count] = '\0';
    }
    if (letter != fake->fail || at != fake->at)
        return CUDA_SUCCESS;
    if (fake->times == 0)
        return fake->then;
    if (fake->times > 0)
        fake->times--;
    if (fake->with == HANG)
        for (;;)
            pause();
    if (fake->with == CRASH)
        _exit(1);
    if (fake->with == FLOOD || fake->with == NONSENSE || fake->with == SHORT)
        write_to_caller(pid);
    return fake->with;
}

static int move(char letter, int pid, int from, int to)
{
    int error = call(letter, pid);
    if (error != CUDA_SUCCESS)
        return error;
    if (fake->state[fake_find(pid)] != from)
        return CUDA_ERROR_ILLEGAL_STATE;
    fake->state[fake_find(pid)] = to;
    return CUDA_SUCCESS;
}

static int fake_init(unsigned flags)
{
    return flags == 0 ? fake->init : CUDA_ERROR_INVALID_VALUE;
}

static int fake_name(int error, const char **text)
{
    *text = error == CUDA_ERROR_NOT_READY ? "CUDA_ERROR_NOT_READY" : NULL;
    return *text != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static int fake_words(int error, const char **text)
{
    *text = "device not ready";
    return error == CUDA_ERROR_NOT_READY ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static int fake_count(int *count)
{
    *count = 1;
    return CUDA_SUCCESS;
}

static int fake_get(int *device, int ordinal)
{
    *device = ordinal;
    return CUDA_SUCCESS;
}

static int fake_uuid(struct cuda_uuid *uuid, int device)
{
    memset(uuid, device + 1, sizeof(*uuid));
    return CUDA_SUCCESS;
}

static int fake_gpu_name(char *name, int length, int device)
{
    snprintf(name, (size_t)length, "GPU %d", device);
    return CUDA_SUCCESS;
}

static int fake_memory(size_t *bytes, int device)
{
    *bytes = (size_t)(device + 1) << 30;
    return CUDA_SUCCESS;
}

static int fake_state(int pid, int *state)
{
    int error = call('S', pid);
    if (error != CUDA_SUCCESS)
        return error;
    *state = fake->state[fake_find(pid)];
    return *state == CUDA_NONE ? CUDA_ERROR_NOT_INITIALIZED : CUDA_SUCCESS;
}

static int fake_lock(int pid, struct cuda_lock_args *args)
{
    CHECK(args->timeout_ms > 0 && args->reserved0 == 0);
    return move('L', pid, CUDA_RUNNING, CUDA_LOCKED);
}

static int fake_checkpoint(int pid, struct cuda_checkpoint_args *args)
{
    CHECK(args->custom_storage == NULL);
    io_sleep_ms(fake->slow_ms);
    return move('C', pid, CUDA_LOCKED, CUDA_CHECKPOINTED);
}

static int fake_restore(int pid, struct cuda_restore_args *args)
{
    CHECK((args->pair_count == 0) == (args->pairs == NULL) && args->custom_storage == NULL);
    io_sleep_ms(fake->slow_ms);
    return move('R', pid, CUDA_CHECKPOINTED, CUDA_LOCKED);
}

static int fake_unlock(int pid, struct cuda_unlock_args *args)
{
    CHECK(args->reserved[0] == 0);
    return move('U', pid, CUDA_LOCKED, CUDA_RUNNING);
}

enum cuda_load fake_load(struct cuda_driver *driver)
{
    *driver = (struct cuda_driver){.version = 13000,
                                   .init = fake_init,
                                   .get_error_name = fake_name,
                                   .get_error_string = fake_words,
                                   .device_get_count = fake_count,
                                   .device_get = fake_get,
                                   .device_get_uuid = fake_uuid,
                                   .device_get_name = fake_gpu_name,
                                   .device_total_mem = fake_memory,
                                   .get_state = fake_state,
                                   .lock = fake_lock,
                                   .checkpoint = fake_checkpoint,
                                   .restore = fake_restore,
                                   .unlock = fake_unlock};
    return CUDA_LOADED;
}
