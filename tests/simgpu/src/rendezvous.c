// SPDX-License-Identifier: BSD-3-Clause
// The way to another process: its driver thread reads commands from a pipe which has both ends in
// that process, and answers on a second one. Whoever may trace the process opens their other ends
// through /proc. A process tree that is saved contains such pipes whole, so they come back with it.
// Where they are is in the control block: data of this library, found in the mapping of the same file.
#include "rendezvous.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAGIC "simgpu control block 1"

// Not zero, so that it lies in the file's data and not behind it.
volatile struct control control = {.magic = MAGIC, .request_fd = -1, .answer_fd = -1};
static int request_end[2] = {-1, -1}, answer_end[2] = {-1, -1};

static void *serve(void *unused)
{
    prctl(PR_SET_NAME, "cuda-EvtHandlr");
    control.tid = (int32_t)syscall(SYS_gettid);
    control.initialised = 1;
    for (;;) {
        struct command command;
        ssize_t got = read(request_end[0], &command, sizeof(command));
        if (got < 0 && errno == EINTR)
            continue;
        if (got != (ssize_t)sizeof(command))
            return unused; // its pipe was closed by the program: nobody can ask any more
        struct answer answer = {.sequence = command.sequence};
        answer.status = (int32_t)carry_out(&command, &answer.value);
        while (write(answer_end[1], &answer, sizeof(answer)) < 0 && errno == EINTR) {
        }
    }
}

CUresult start_driver_thread(void)
{
    if (pipe2(request_end, O_CLOEXEC) < 0 || pipe2(answer_end, O_CLOEXEC) < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    control.request_fd = request_end[0];
    control.answer_fd = answer_end[0];
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    int error = pthread_create(&thread, NULL, serve, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        return CUDA_ERROR_OPERATING_SYSTEM;
    pthread_detach(thread);
    while (!control.initialised)
        sched_yield();
    return CUDA_SUCCESS;
}

void forget_driver_thread(void)
{
    control.initialised = 0;
    for (int i = 0; i < 2; i++) {
        close(request_end[i]);
        close(answer_end[i]);
        request_end[i] = answer_end[i] = -1;
    }
}

struct mapping {
    unsigned long start, end, offset;
    unsigned long inode;
    unsigned int major, minor;
    char permissions[8];
};

static bool parse_mapping(const char *line, struct mapping *mapping)
{
    return sscanf(line, "%lx-%lx %7s %lx %x:%x %lu", &mapping->start, &mapping->end,
                  mapping->permissions, &mapping->offset, &mapping->major, &mapping->minor,
                  &mapping->inode) == 7;
}

// Our own mapping that holds the control block, and how far into the file the block is.
static bool own_mapping(struct mapping *found, unsigned long *position)
{
    unsigned long address = (unsigned long)(uintptr_t)&control;
    char line[4352];
    FILE *maps = fopen("/proc/self/maps", "re");
    bool ok = false;
    while (maps && !ok && fgets(line, sizeof(line), maps))
        ok = parse_mapping(line, found) && found->start <= address && address < found->end;
    if (maps)
        fclose(maps);
    *position = ok ? found->offset + (address - found->start) : 0;
    return ok && found->inode != 0;
}

CUresult read_control(int pid, struct control *out)
{
    struct mapping own, one;
    unsigned long position;
    char line[4352];
    if (pid <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (!own_mapping(&own, &position))
        return CUDA_ERROR_OPERATING_SYSTEM;
    snprintf(line, sizeof(line), "/proc/%d/maps", pid);
    FILE *maps = fopen(line, "re");
    if (!maps)
        return errno == ENOENT ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_OPERATING_SYSTEM;
    CUresult result = CUDA_ERROR_NOT_INITIALIZED;
    while (result == CUDA_ERROR_NOT_INITIALIZED && fgets(line, sizeof(line), maps)) {
        if (!parse_mapping(line, &one) || one.inode != own.inode || one.major != own.major ||
            one.minor != own.minor || one.permissions[1] != 'w' || position < one.offset ||
            position - one.offset >= one.end - one.start)
            continue;
        struct iovec here = {out, sizeof(*out)};
        struct iovec there = {(void *)(uintptr_t)(one.start + (position - one.offset)),
                              sizeof(*out)};
        ssize_t got = process_vm_readv(pid, &here, 1, &there, 1, 0);
        if (got != (ssize_t)sizeof(*out))
            result = CUDA_ERROR_OPERATING_SYSTEM; // no right to trace it
        else if (memcmp(out->magic, MAGIC, sizeof(MAGIC)) == 0 && out->initialised)
            result = CUDA_SUCCESS;
    }
    fclose(maps);
    return result;
}

// The number of a thread in the innermost namespace of process numbers.
static int inner_number(int pid, const char *task)
{
    char path[64], line[256];
    snprintf(path, sizeof(path), "/proc/%d/task/%.16s/status", pid, task);
    FILE *status = fopen(path, "re");
    int number = -1;
    while (status && fgets(line, sizeof(line), status)) {
        if (strncmp(line, "NSpid:", 6) == 0) {
            char *last = strrchr(line, '\t');
            number = last ? atoi(last + 1) : -1;
        }
    }
    if (status)
        fclose(status);
    return number;
}

CUresult restore_thread(int pid, int *tid)
{
    struct control other;
    CUresult result = read_control(pid, &other);
    if (result != CUDA_SUCCESS)
        return result;
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/task", pid);
    DIR *tasks = opendir(path);
    result = CUDA_ERROR_NOT_INITIALIZED;
    for (struct dirent *entry; tasks && (entry = readdir(tasks));) {
        if (isdigit((unsigned char)entry->d_name[0]) &&
            inner_number(pid, entry->d_name) == other.tid) {
            *tid = atoi(entry->d_name);
            result = CUDA_SUCCESS;
        }
    }
    if (tasks)
        closedir(tasks);
    return result;
}

static int open_pipe(int pid, int fd, int flags)
{
    char path[64];
    snprintf(path, sizeof(path), "/proc/%d/fd/%d", pid, fd);
    return open(path, flags | O_CLOEXEC);
}

static CUresult exchange(int request, int answer, const struct command *command, uint64_t *value)
{
    struct answer got;
    // Answers that were meant for somebody who has died.
    for (struct pollfd ready = {answer, POLLIN, 0}; poll(&ready, 1, 0) > 0;)
        if (read(answer, &got, sizeof(got)) <= 0)
            return CUDA_ERROR_OPERATING_SYSTEM;
    if (write(request, command, sizeof(*command)) != (ssize_t)sizeof(*command))
        return CUDA_ERROR_OPERATING_SYSTEM;
    for (;;) {
        ssize_t size = read(answer, &got, sizeof(got));
        if (size < 0 && errno == EINTR)
            continue;
        if (size != (ssize_t)sizeof(got))
            return CUDA_ERROR_OPERATING_SYSTEM; // the process has died
        if (got.sequence != command->sequence)
            continue;
        if (value)
            *value = got.value;
        return (CUresult)got.status;
    }
}

CUresult send_command(int pid, struct command *command, uint64_t *value)
{
    static uint32_t sequence;
    struct control other;
    CUresult result = read_control(pid, &other);
    if (result != CUDA_SUCCESS)
        return result;
    int request = open_pipe(pid, other.request_fd, O_WRONLY);
    int answer = request < 0 ? -1 : open_pipe(pid, other.answer_fd, O_RDONLY);
    if (answer < 0) {
        result = CUDA_ERROR_OPERATING_SYSTEM;
    } else {
        while (flock(request, LOCK_EX) < 0 && errno == EINTR) {
        }
        command->sequence = ++sequence ^ (uint32_t)getpid() << 12;
        result = exchange(request, answer, command, value);
    }
    if (request >= 0)
        close(request);
    if (answer >= 0)
        close(answer);
    return result;
}
