/* SPDX-License-Identifier: BSD-3-Clause */
/* Clock, bounded reads and writes, and the command lines that arrive on stdin. */
#ifndef KC_IO_H
#define KC_IO_H

#include <dirent.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

/* Seconds on a clock that never jumps. */
double io_now(void);
/* Milliseconds from now until `deadline` for poll(), at least 0 and at most `most`. */
int io_until(double deadline, int most);
void io_sleep_ms(int ms);

/* Opens /dev/null for each of fds 0, 1, 2 that is closed, so that no later file takes its place. */
bool io_secure_stdio(void);
bool io_write_all(int fd, const void *data, size_t length);
/* Writes in pieces a pipe takes at once; gives up when nothing can be written for wait_ms. */
bool io_write_patiently(int fd, const char *data, size_t length, int wait_ms);
/* Reads a small file below a directory fd whole; the buffer is NUL-terminated. -1 on error, also
 * when the file does not fit. */
ssize_t io_read_file_at(int dir, const char *name, char *buffer, size_t capacity);
/* Reads until EOF at most `limit` bytes into a malloc'ed, NUL-terminated buffer; NULL on error. */
char *io_read_to_end(int fd, size_t limit, size_t *length);
/* A directory below a directory fd; NULL on error. */
DIR *io_open_dir(int dir, const char *name);
/* close() that keeps errno and takes -1. */
void io_close(int *fd);

enum io_command { IO_NONE, IO_EOF, IO_KILL, IO_CANCEL, IO_RESUME, IO_RELEASE, IO_UNKNOWN };

/* The caller's commands, one word a line. */
struct io_lines {
    bool eof;
    bool overlong;       /* dropping the rest of a line that is too long */
    size_t length;
    char buffer[256];
};

/* Reads what is there, without blocking when poll() said readable. Call io_next until IO_NONE. */
void io_fill(struct io_lines *lines, int fd);
enum io_command io_next(struct io_lines *lines);

/* Whoever started this program, and may give it up: by a signal, a line or by going away. */
struct io_caller {
    int signals; /* signalfd */
    struct io_lines lines;
};

/* Blocks the signals that ask a program to end, and collects them. False: see errno. */
bool io_hear(struct io_caller *caller);
/* Waits for `fd` (-1: for none) and for the caller, at most `most` ms. IO_CANCEL: it is given up, in whatever
 * way; IO_RESUME: the caller said that; else IO_NONE. */
enum io_command io_listen(struct io_caller *caller, int fd, int most);

/* waitpid() that is not interrupted; -1 when there is no such child. */
pid_t sys_wait(pid_t pid, int *status);
int sys_pidfd_open(pid_t pid);
int sys_pidfd_signal(int pidfd, int signal);
int sys_close_from(unsigned first);
int sys_close_on_exec_from(unsigned first);

/* Blocks these signals and returns an fd from which they are read; -1 on error. SIGPIPE is ignored. */
int sys_collect_signals(const int *signals, size_t count);
/* In a child, before exec: every signal has its default action and none is blocked. */
void sys_default_signals(void);

#endif
