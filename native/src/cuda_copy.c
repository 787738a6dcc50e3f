/* SPDX-License-Identifier: BSD-3-Clause */
#include "cuda_copy.h"

#include <sys/mman.h>

#include "cuda_pace.h"
#include "cuda_storage.h"
#include "io.h"

enum { TRIES = 3 };
enum { PIN_FOR_ALL = 1 }; /* in every context */

static unsigned char *blocks;
static bool pinned; /* or tried in vain */

bool cuda_blocks_make(void)
{
    if (blocks != NULL)
        return true;
    void *memory = mmap(NULL, (size_t)2 * CUDA_BLOCK, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (memory == MAP_FAILED)
        return false;
    blocks = memory;
    return true;
}

unsigned char *cuda_block(int number)
{
    return blocks + (number == 0 ? 0 : CUDA_BLOCK);
}

void cuda_blocks_pin(const struct cuda_driver *driver)
{
    if (!pinned)
        driver->pin(blocks, (size_t)2 * CUDA_BLOCK, PIN_FOR_ALL);
    pinned = true;
}

void cuda_blocks_leave(void)
{
    blocks = NULL;
    pinned = false;
}

bool cuda_storage_contexts(const struct cuda_driver *driver)
{
    static bool retained;
    int count = 0;
    if (retained)
        return true;
    bool all = driver->device_get_count(&count) == CUDA_SUCCESS && count > 0;
    for (int i = 0; i < count; i++) {
        void *context = NULL;
        int device;
        if (driver->device_get(&device, i) == CUDA_SUCCESS &&
            driver->retain_context(&context, device) == CUDA_SUCCESS)
            driver->set_context(context); /* any: memory cannot be pinned without */
        else
            all = false;
    }
    retained = all;
    return all;
}

void cuda_enter(const struct cuda_driver *driver, const struct cuda_storage_part *part,
                struct cuda_uuid *uuid)
{
    void *context = NULL;
    int device;
    *uuid = (struct cuda_uuid){.bytes = {0}};
    if (driver->stream_context(part->stream, &context) != CUDA_SUCCESS || context == NULL ||
        driver->set_context(context) != CUDA_SUCCESS ||
        driver->context_device(&device) != CUDA_SUCCESS ||
        driver->device_get_uuid(uuid, device) != CUDA_SUCCESS)
        *uuid = (struct cuda_uuid){.bytes = {0}};
}

size_t cuda_block_size(const struct cuda_storage_part *part, size_t at)
{
    return part->size - at < CUDA_BLOCK ? part->size - at : CUDA_BLOCK;
}

int cuda_copy_block(const struct cuda_driver *driver, const struct cuda_storage_part *part, size_t at,
                    size_t size, unsigned char *block, bool to_host)
{
    int error = CUDA_SUCCESS;
    for (int i = 0; i < TRIES; i++) {
        if (i > 0)
            io_sleep_ms(CUDA_RETRY_MS);
        error = to_host ? driver->to_host(block, part->address + at, size, part->stream)
                        : driver->to_device(part->address + at, block, size, part->stream);
        if (error == CUDA_SUCCESS)
            error = driver->wait_stream(part->stream);
        if (error == CUDA_SUCCESS)
            break;
    }
    return error;
}

/* What a call says is not all: it may have been done even so, or be done when it is asked for again. But once it
 * is done the operation is gone, and is named no more: it is asked for again only where it failed and the driver
 * says that it is not done. */
int cuda_complete(const struct cuda_work *work, const struct cuda_task *task,
                  const struct cuda_storage_info *info, int expected)
{
    void *operation = info->operation;
    bool asks = true;
    bool accepted = false;
    int error = CUDA_SUCCESS;
    for (int i = 0; i < TRIES; i++) {
        int state = CUDA_NONE;
        if (i > 0)
            io_sleep_ms(CUDA_RETRY_MS);
        int now = asks ? work->driver->complete(operation) : CUDA_SUCCESS;
        accepted = accepted || (asks && now == CUDA_SUCCESS);
        int seen = work->driver->get_state(task->pid, &state);
        if (!cuda_alive(work, task) || (seen == CUDA_SUCCESS && state == expected))
            return CUDA_SUCCESS;
        asks = !accepted && seen == CUDA_SUCCESS;
        error = now != CUDA_SUCCESS ? now : error != CUDA_SUCCESS ? error : CUDA_ERROR_ILLEGAL_STATE;
    }
    return error;
}
