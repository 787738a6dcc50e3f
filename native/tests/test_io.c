/* SPDX-License-Identifier: BSD-3-Clause */
#include "check.h"
#include "io.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

static struct io_lines lines;
static int ends[2];

static void say(const char *text)
{
    CHECK(io_write_all(ends[1], text, strlen(text)));
}

static void commands(void)
{
    CHECK(pipe2(ends, O_CLOEXEC) == 0);
    memset(&lines, 0, sizeof(lines));
    say("kill\nrel");
    io_fill(&lines, ends[0]);
    CHECK(io_next(&lines) == IO_KILL && io_next(&lines) == IO_NONE);
    say("ease\r\n\n\nresume\ncancel\nwhat\n killx\n");
    io_fill(&lines, ends[0]);
    CHECK(io_next(&lines) == IO_RELEASE && io_next(&lines) == IO_RESUME);
    CHECK(io_next(&lines) == IO_CANCEL && io_next(&lines) == IO_UNKNOWN);
    CHECK(io_next(&lines) == IO_UNKNOWN && io_next(&lines) == IO_NONE);
    /* A line longer than the buffer is dropped whole, its tail is not taken for a command. */
    for (int i = 0; i < 1000; i++) {
        say("xxxxxxxxxx");
        io_fill(&lines, ends[0]);
        CHECK(io_next(&lines) == IO_NONE);
    }
    say("kill\nrelease\n");
    enum io_command got = IO_NONE;
    for (int i = 0; i < 10 && got == IO_NONE; i++) {
        io_fill(&lines, ends[0]);
        got = io_next(&lines);
    }
    CHECK(got == IO_RELEASE);
    say("resume\nunfinished");
    io_close(&ends[1]);
    for (int i = 0; i < 4; i++)
        io_fill(&lines, ends[0]);
    CHECK(io_next(&lines) == IO_RESUME && io_next(&lines) == IO_EOF && io_next(&lines) == IO_EOF);
    io_close(&ends[0]);
}

static void random_input(void)
{
    uint64_t state = 123456789;
    CHECK(pipe2(ends, O_CLOEXEC) == 0);
    memset(&lines, 0, sizeof(lines));
    for (int i = 0; i < 5000; i++) {
        char chunk[512];
        size_t length = 1 + check_random(&state) % (sizeof(chunk) - 1);
        for (size_t k = 0; k < length; k++)
            chunk[k] = "kilresumcan\n\r\0x"[check_random(&state) % 15];
        CHECK(io_write_all(ends[1], chunk, length));
        for (int n = 0; n < 8 && length > 0; n++) {
            io_fill(&lines, ends[0]);
            while (io_next(&lines) != IO_NONE)
                CHECK(lines.length <= sizeof(lines.buffer));
            length = length > sizeof(lines.buffer) ? length - sizeof(lines.buffer) : 0;
        }
    }
    io_close(&ends[1]);
    io_close(&ends[0]);
}

static void files(void)
{
    char base[] = "/tmp/kernel-capture-io-XXXXXX";
    char buffer[8];
    CHECK(mkdtemp(base) != NULL);
    int dir = open(base, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int fd = openat(dir, "seven", O_RDWR | O_CREAT, 0600);
    CHECK(fd >= 0 && io_write_all(fd, "1234567", 7));
    CHECK(io_read_file_at(dir, "seven", buffer, sizeof(buffer)) == 7);
    CHECK_STRING(buffer, "1234567");
    CHECK(io_read_file_at(dir, "seven", buffer, 7) == -1); /* does not fit with its end */
    CHECK(io_read_file_at(dir, "none", buffer, sizeof(buffer)) == -1);
    CHECK(symlinkat("seven", dir, "link") == 0);
    CHECK(io_read_file_at(dir, "link", buffer, sizeof(buffer)) == -1);
    size_t length = 0;
    CHECK(lseek(fd, 0, SEEK_SET) == 0);
    char *whole = io_read_to_end(fd, 100, &length);
    CHECK(whole != NULL && length == 7);
    CHECK_STRING(whole, "1234567");
    free(whole);
    CHECK(ftruncate(fd, 100000) == 0 && lseek(fd, 0, SEEK_SET) == 0);
    CHECK(io_read_to_end(fd, 20000, &length) == NULL); /* more than the limit */
    io_close(&fd);
    CHECK(unlinkat(dir, "seven", 0) == 0 && unlinkat(dir, "link", 0) == 0 && rmdir(base) == 0);
    io_close(&dir);
    CHECK(dir == -1);
    io_close(&dir);
}

static void patience(void)
{
    /* A reader that never reads cannot hold the writer up. */
    static char data[1 << 20];
    CHECK(pipe2(ends, O_CLOEXEC) == 0);
    double start = io_now();
    CHECK(!io_write_patiently(ends[1], data, sizeof(data), 50));
    CHECK(io_now() - start < 5.0);
    io_close(&ends[0]);
    io_close(&ends[1]);
    CHECK(io_until(io_now() - 1.0, 1000) == 0);
    CHECK(io_until(io_now() + 1000.0, 1000) == 1000);
    int left = io_until(io_now() + 0.5, 1000);
    CHECK(left > 0 && left <= 501);
}

static void caller(void)
{
    struct io_caller caller = {.signals = -1};
    CHECK(pipe2(ends, O_CLOEXEC) == 0 && dup2(ends[0], STDIN_FILENO) == STDIN_FILENO);
    CHECK(io_hear(&caller) && io_listen(&caller, -1, 0) == IO_NONE);
    CHECK(raise(SIGTERM) == 0 && io_listen(&caller, -1, 10000) == IO_CANCEL);
    CHECK(io_listen(&caller, -1, 0) == IO_NONE); /* it was read, so that the next one waits again */
    CHECK(io_write_all(ends[1], "resume\n", 7) && io_listen(&caller, -1, 10000) == IO_RESUME);
    CHECK(io_write_all(ends[1], "cancel\nresume\n", 14));
    CHECK(io_listen(&caller, -1, 10000) == IO_CANCEL);
    io_close(&ends[1]);
    CHECK(io_listen(&caller, -1, 10000) == IO_CANCEL && caller.lines.eof);
    CHECK(io_listen(&caller, -1, 0) == IO_NONE);
    io_close(&ends[0]);
    io_close(&caller.signals);
}

int main(void)
{
    commands();
    random_input();
    files();
    patience();
    caller();
    return 0;
}
