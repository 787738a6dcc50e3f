/* SPDX-License-Identifier: BSD-3-Clause */
#include "cuda_file.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "io.h"

enum { NAME = 40 };

enum job { JOB_NONE, JOB_CREATE, JOB_RESERVE, JOB_WRITE, JOB_SYNC, JOB_LIST, JOB_REMOVE };

struct cuda_file {
    pthread_mutex_t mutex;
    pthread_cond_t asked, done;
    bool left; /* nobody asks any more */
    enum job job;
    int error; /* of the last one */
    /* Of the thread while it is at work, else of who asks. */
    int folder;
    pid_t pid;
    int fd;
    const unsigned char *data;
    size_t size;
    uint64_t at;
    char *text;
};

static void name_of(char name[NAME], pid_t pid, const char *end)
{
    snprintf(name, NAME, "gpu-memory-%d%s", pid, end);
}

int cuda_file_open(int folder, pid_t pid, const char *end, int flags)
{
    char name[NAME];
    name_of(name, pid, end);
    return openat(folder, name, flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
}

static int remove_file(int folder, pid_t pid, const char *end)
{
    char name[NAME];
    name_of(name, pid, end);
    return unlinkat(folder, name, 0) == 0 || errno == ENOENT ? 0 : errno;
}

/* A new one: what is there may be another's, or be read by others. */
static int make_file(int folder, pid_t pid, const char *end, int flags)
{
    remove_file(folder, pid, end);
    return cuda_file_open(folder, pid, end, flags | O_CREAT | O_EXCL);
}

/* What the thread does; each returns 0 or an errno value --------------------------------------- */

static int create(struct cuda_file *file)
{
    int error = remove_file(file->folder, file->pid, ".parts");
    if (error != 0)
        return error; /* one of before would make what is not written now count */
    file->fd = make_file(file->folder, file->pid, "", O_RDWR);
    if (file->fd < 0)
        return errno;
    if (file->at == 0 || fallocate(file->fd, FALLOC_FL_KEEP_SIZE, 0, (off_t)file->at) == 0)
        return 0;
    return errno == ENOSPC || errno == EDQUOT || errno == EFBIG ? errno : 0;
}

/* What is not there now may be there later, block by block. */
static int reserve(const struct cuda_file *file)
{
    if (file->at > 0)
        fallocate(file->fd, FALLOC_FL_KEEP_SIZE, 0, (off_t)file->at);
    return 0;
}

static int write_data(const struct cuda_file *file)
{
    const unsigned char *data = file->data;
    size_t size = file->size;
    uint64_t at = file->at;
    while (size > 0) {
        ssize_t n = pwrite(file->fd, data, size, (off_t)at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return n == 0 ? ENOSPC : errno;
        data += n;
        size -= (size_t)n;
        at += (uint64_t)n;
    }
    /* Begun early, so that what is not on the disk yet does not fill the memory. */
    sync_file_range(file->fd, (off_t)file->at, (off_t)file->size, SYNC_FILE_RANGE_WRITE);
    return 0;
}

static int write_list(const struct cuda_file *file)
{
    int fd = make_file(file->folder, file->pid, ".parts", O_WRONLY);
    errno = fd < 0 ? errno : EIO;
    int error = fd >= 0 && io_write_all(fd, file->text, strlen(file->text)) ? 0 : errno;
    io_close(&fd);
    return error;
}

static int remove_all(const struct cuda_file *file)
{
    int error = remove_file(file->folder, file->pid, ".parts");
    int other = remove_file(file->folder, file->pid, "");
    return error != 0 ? error : other;
}

static int carry_out(struct cuda_file *file)
{
    switch (file->job) {
    case JOB_CREATE:
        return create(file);
    case JOB_RESERVE:
        return reserve(file);
    case JOB_WRITE:
        return write_data(file);
    case JOB_SYNC:
        return fdatasync(file->fd) == 0 ? 0 : errno;
    case JOB_LIST:
        return write_list(file);
    case JOB_REMOVE:
        return remove_all(file);
    case JOB_NONE:
        break;
    }
    return 0;
}

static void destroy(struct cuda_file *file)
{
    io_close(&file->fd);
    pthread_mutex_destroy(&file->mutex);
    pthread_cond_destroy(&file->asked);
    pthread_cond_destroy(&file->done);
    free(file->text);
    free(file);
}

static void *work(void *data)
{
    struct cuda_file *file = data;
    pthread_mutex_lock(&file->mutex);
    while (!file->left) {
        if (file->job == JOB_NONE) {
            pthread_cond_wait(&file->asked, &file->mutex);
            continue;
        }
        pthread_mutex_unlock(&file->mutex);
        int error = carry_out(file);
        pthread_mutex_lock(&file->mutex);
        file->error = error;
        file->job = JOB_NONE;
        pthread_cond_signal(&file->done);
    }
    pthread_mutex_unlock(&file->mutex);
    destroy(file);
    return NULL;
}

/* Who asks -------------------------------------------------------------------------------------- */

struct cuda_file *cuda_file_start(int folder, pid_t pid)
{
    pthread_condattr_t clock;
    pthread_t thread;
    struct cuda_file *file = calloc(1, sizeof(*file));
    if (file == NULL)
        return NULL;
    file->folder = folder;
    file->pid = pid;
    file->fd = -1;
    pthread_mutex_init(&file->mutex, NULL);
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&file->asked, NULL);
    pthread_cond_init(&file->done, &clock);
    pthread_condattr_destroy(&clock);
    if (pthread_create(&thread, NULL, work, file) != 0) {
        destroy(file);
        return NULL;
    }
    pthread_detach(thread);
    return file;
}

static void ask(struct cuda_file *file, enum job job)
{
    pthread_mutex_lock(&file->mutex);
    file->job = job;
    pthread_cond_signal(&file->asked);
    pthread_mutex_unlock(&file->mutex);
}

void cuda_file_create(struct cuda_file *file, uint64_t bytes)
{
    file->at = bytes;
    ask(file, JOB_CREATE);
}

void cuda_file_reserve(struct cuda_file *file, uint64_t bytes)
{
    file->at = bytes;
    ask(file, JOB_RESERVE);
}

void cuda_file_write(struct cuda_file *file, const void *data, size_t size, uint64_t at)
{
    file->data = data;
    file->size = size;
    file->at = at;
    ask(file, JOB_WRITE);
}

void cuda_file_sync(struct cuda_file *file)
{
    ask(file, JOB_SYNC);
}

void cuda_file_list(struct cuda_file *file, const char *text)
{
    free(file->text);
    file->text = strdup(text);
    if (file->text == NULL)
        file->error = ENOMEM;
    else
        ask(file, JOB_LIST);
}

void cuda_file_remove(struct cuda_file *file)
{
    ask(file, JOB_REMOVE);
}

bool cuda_file_wait(struct cuda_file *file, int ms)
{
    struct timespec until;
    int error = 0;
    clock_gettime(CLOCK_MONOTONIC, &until);
    long nanoseconds = until.tv_nsec + (long)(ms % 1000) * 1000000L;
    until.tv_sec += ms / 1000 + nanoseconds / 1000000000L;
    until.tv_nsec = nanoseconds % 1000000000L;
    pthread_mutex_lock(&file->mutex);
    while (file->job != JOB_NONE && error == 0)
        error = pthread_cond_timedwait(&file->done, &file->mutex, &until);
    bool idle = file->job == JOB_NONE;
    pthread_mutex_unlock(&file->mutex);
    return idle;
}

int cuda_file_error(const struct cuda_file *file)
{
    return file->error;
}

int cuda_file_fd(const struct cuda_file *file)
{
    return file->fd;
}

bool cuda_file_leave(struct cuda_file *file)
{
    pthread_mutex_lock(&file->mutex);
    bool reads = file->job == JOB_WRITE;
    file->left = true;
    pthread_cond_signal(&file->asked);
    pthread_mutex_unlock(&file->mutex);
    return reads;
}
