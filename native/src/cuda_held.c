/* SPDX-License-Identifier: BSD-3-Clause */
#include "cuda_held.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda_copy.h"
#include "hostmem.h"

/* Bytes that are left for others: more where there is a choice, because who fills the memory is killed for it. */
static const uint64_t spare = 64 << 20, spare_at_choice = 1 << 30;

static struct cuda_held *all;

static struct cuda_held **place_of(pid_t pid)
{
    struct cuda_held **at = &all;
    while (*at != NULL && (*at)->pid != pid)
        at = &(*at)->next;
    return at;
}

static size_t size_of_rest(const struct cuda_held *held)
{
    uint64_t size = held->parts.total - held->in_file;
    return size > 0 ? size : 1;
}

struct cuda_held *cuda_held_make(pid_t pid)
{
    cuda_held_drop(pid);
    struct cuda_held *held = calloc(1, sizeof(*held));
    if (held == NULL)
        return NULL;
    held->pid = pid;
    held->next = all;
    all = held;
    return held;
}

struct cuda_held *cuda_held_find(pid_t pid)
{
    return *place_of(pid);
}

void cuda_held_drop(pid_t pid)
{
    struct cuda_held **at = place_of(pid);
    struct cuda_held *held = *at;
    if (held == NULL)
        return;
    *at = held->next;
    if (held->rest != NULL)
        munmap(held->rest, size_of_rest(held));
    cuda_held_leave_file(held);
    free(held);
}

bool cuda_held_take(struct cuda_held *held, uint64_t in_file, bool must)
{
    uint64_t need = held->parts.total - in_file;
    uint64_t beside = spare;
    int64_t there = hostmem_available("", getpid());
    if (!must) {
        beside = need / 8 > spare_at_choice ? need / 8 : spare_at_choice;
        beside += (uint64_t)hostmem_unwritten(""); /* what a disk that hangs does not take is not free */
    }
    if (there >= 0 && need > 0 && need + beside > (uint64_t)there)
        return false;
    void *memory = mmap(NULL, need > 0 ? need : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return false;
    held->in_file = in_file;
    held->rest = memory;
    return true;
}

void cuda_held_leave_file(struct cuda_held *held)
{
    if (held->file != NULL && cuda_file_leave(held->file))
        cuda_blocks_leave();
    held->file = NULL;
}
