/* SPDX-License-Identifier: BSD-3-Clause */
#include "io.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* What a pipe that poll() called writable takes without blocking (POSIX's least PIPE_BUF is less). */
enum { PIECE = 4096 };

double io_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

int io_until(double deadline, int most)
{
    double left = (deadline - io_now()) * 1000.0;
    if (left <= 0.0)
        return 0;
    return left >= (double)most ? most : (int)left + 1;
}

void io_sleep_ms(int ms)
{
    struct timespec pause = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000L};
    nanosleep(&pause, NULL);
}

bool io_secure_stdio(void)
{
    for (int fd = 0; fd <= 2; fd++) {
        if (fcntl(fd, F_GETFD) != -1)
            continue;
        if (errno != EBADF)
            return false;
        if (open("/dev/null", O_RDWR) != fd)
            return false;
    }
    return true;
}

bool io_write_all(int fd, const void *data, size_t length)
{
    const char *bytes = data;
    while (length > 0) {
        ssize_t n = write(fd, bytes, length);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return false;
        bytes += n;
        length -= (size_t)n;
    }
    return true;
}

bool io_write_patiently(int fd, const char *data, size_t length, int wait_ms)
{
    while (length > 0) {
        struct pollfd ready = {.fd = fd, .events = POLLOUT};
        int n = poll(&ready, 1, wait_ms);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0 || (ready.revents & POLLOUT) == 0)
            return false;
        ssize_t done = write(fd, data, length < PIECE ? length : PIECE);
        if (done < 0 && (errno == EINTR || errno == EAGAIN))
            continue;
        if (done <= 0)
            return false;
        data += done;
        length -= (size_t)done;
    }
    return true;
}

ssize_t io_read_file_at(int dir, const char *name, char *buffer, size_t capacity)
{
    int fd = openat(dir, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0)
        return -1;
    size_t used = 0;
    ssize_t result = -1;
    for (;;) {
        char beyond; /* a byte more than fits shows that the file does not */
        bool full = used + 1 >= capacity;
        ssize_t n = full ? read(fd, &beyond, 1) : read(fd, buffer + used, capacity - 1 - used);
        if (n < 0 && errno == EINTR)
            continue;
        if (n > 0 && full)
            errno = EFBIG;
        if (n < 0 || (n > 0 && full))
            break;
        if (n == 0) {
            buffer[used] = '\0';
            result = (ssize_t)used;
            break;
        }
        used += (size_t)n;
    }
    io_close(&fd);
    return result;
}

char *io_read_to_end(int fd, size_t limit, size_t *length)
{
    size_t capacity = 16384;
    size_t used = 0;
    char *buffer = malloc(capacity);
    while (buffer != NULL) {
        if (used + 1 >= capacity) {
            if (capacity >= limit) {
                errno = EFBIG;
                break;
            }
            size_t bigger = capacity * 2 < limit ? capacity * 2 : limit;
            char *moved = realloc(buffer, bigger);
            if (moved == NULL)
                break;
            buffer = moved;
            capacity = bigger;
        }
        ssize_t n = read(fd, buffer + used, capacity - 1 - used);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            break;
        if (n == 0) {
            buffer[used] = '\0';
            *length = used;
            return buffer;
        }
        used += (size_t)n;
    }
    free(buffer);
    return NULL;
}

DIR *io_open_dir(int dir, const char *name)
{
    int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *opened = fd < 0 ? NULL : fdopendir(fd);
    if (opened == NULL)
        io_close(&fd);
    return opened;
}

void io_close(int *fd)
{
    if (*fd < 0)
        return;
    int saved = errno;
    close(*fd);
    errno = saved;
    *fd = -1;
}

void io_fill(struct io_lines *lines, int fd)
{
    if (lines->eof)
        return;
    if (lines->length == sizeof(lines->buffer)) {
        lines->overlong = true;
        lines->length = 0;
    }
    ssize_t n = read(fd, lines->buffer + lines->length, sizeof(lines->buffer) - lines->length);
    if (n < 0 && (errno == EINTR || errno == EAGAIN))
        return;
    if (n <= 0)
        lines->eof = true;
    else
        lines->length += (size_t)n;
}

static enum io_command command_of(const char *word, size_t length)
{
    static const struct {
        const char *word;
        enum io_command command;
    } commands[] = {
        {"kill", IO_KILL}, {"cancel", IO_CANCEL}, {"resume", IO_RESUME}, {"release", IO_RELEASE}};
    if (length > 0 && word[length - 1] == '\r')
        length--;
    for (size_t i = 0; i < sizeof(commands) / sizeof(commands[0]); i++)
        if (strlen(commands[i].word) == length && memcmp(commands[i].word, word, length) == 0)
            return commands[i].command;
    return IO_UNKNOWN;
}

enum io_command io_next(struct io_lines *lines)
{
    for (;;) {
        char *end = memchr(lines->buffer, '\n', lines->length);
        if (end == NULL)
            return lines->eof ? IO_EOF : IO_NONE;
        size_t word = (size_t)(end - lines->buffer);
        bool skip = lines->overlong || word == 0;
        enum io_command command = command_of(lines->buffer, word);
        lines->overlong = false;
        lines->length -= word + 1;
        memmove(lines->buffer, end + 1, lines->length);
        if (!skip)
            return command;
    }
}

bool io_hear(struct io_caller *caller)
{
    static const int ends[] = {SIGTERM, SIGINT, SIGHUP};
    caller->signals = sys_collect_signals(ends, sizeof(ends) / sizeof(ends[0]));
    return caller->signals >= 0;
}

enum io_command io_listen(struct io_caller *caller, int fd, int most)
{
    struct pollfd fds[3] = {{.fd = fd, .events = POLLIN},
                            {.fd = caller->signals, .events = POLLIN},
                            {.fd = caller->lines.eof ? -1 : STDIN_FILENO, .events = POLLIN}};
    enum io_command heard = IO_NONE;
    struct signalfd_siginfo info;
    poll(fds, 3, most);
    if (fds[2].revents != 0) {
        io_fill(&caller->lines, STDIN_FILENO);
        for (enum io_command command; (command = io_next(&caller->lines)) != IO_NONE;) {
            if (command == IO_RESUME && heard == IO_NONE)
                heard = IO_RESUME;
            else if (command == IO_CANCEL || command == IO_KILL || command == IO_EOF)
                heard = IO_CANCEL;
            if (command == IO_EOF)
                break;
        }
    }
    if (fds[1].revents != 0 && read(caller->signals, &info, sizeof(info)) == (ssize_t)sizeof(info))
        heard = IO_CANCEL;
    return heard;
}

pid_t sys_wait(pid_t pid, int *status)
{
    pid_t got;
    do
        got = waitpid(pid, status, 0);
    while (got < 0 && errno == EINTR);
    return got;
}

int sys_pidfd_open(pid_t pid)
{
    return (int)syscall(SYS_pidfd_open, pid, 0);
}

int sys_pidfd_signal(int pidfd, int signal)
{
    return (int)syscall(SYS_pidfd_send_signal, pidfd, signal, NULL, 0);
}

int sys_close_from(unsigned first)
{
    return (int)syscall(SYS_close_range, first, ~0U, 0);
}

int sys_close_on_exec_from(unsigned first)
{
    return (int)syscall(SYS_close_range, first, ~0U, CLOSE_RANGE_CLOEXEC);
}

int sys_collect_signals(const int *signals, size_t count)
{
    sigset_t set;
    sigemptyset(&set);
    for (size_t i = 0; i < count; i++)
        sigaddset(&set, signals[i]);
    signal(SIGPIPE, SIG_IGN);
    /* An ignored SIGCHLD, inherited from the caller, would make the kernel reap itself. */
    signal(SIGCHLD, SIG_DFL);
    return sigprocmask(SIG_BLOCK, &set, NULL) == 0 ? signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK)
                                                   : -1;
}

void sys_default_signals(void)
{
    /* All zero in the kernel's own layout: the default action, an empty mask. The C library's
     * calls leave its own signals (32, 33) alone, which a caller may ignore or block too. */
    static const unsigned char zero[64];
    const size_t mask_size = 8;
    for (int number = 1; number < NSIG; number++)
        syscall(SYS_rt_sigaction, number, zero, NULL, mask_size);
    syscall(SYS_rt_sigprocmask, SIG_SETMASK, zero, NULL, mask_size);
}
