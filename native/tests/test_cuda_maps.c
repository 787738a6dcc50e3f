/* SPDX-License-Identifier: BSD-3-Clause */
/* Which memory came into being: lines of /proc/PID/maps, differences, a real process. */
#include "check.h"
#include "cuda_maps.h"

#include <sys/mman.h>
#include <unistd.h>

#include "procfs.h"

static void test_lines(void)
{
    static const struct {
        const char *line;
        bool counts;
    } cases[] = {
        {"7f0000000000-7f0000002000 rw-p 00000000 00:00 0 \n", true},
        {"7f0000000000-7f0000002000 rw-p 00000000 00:00 0", true},
        {"7f0000000000-7f0000002000 r--p 00000000 00:00 0                   [anon:arena]\n", true},
        {"7f0000000000-7f0000002000 rw-s 00000000 00:01 77          /dev/zero (deleted)\n", true},
        {"7f0000000000-7f0000002000 rw-s 00000000 00:01 77          /memfd:nv (deleted)\n", true},
        {"7f0000000000-7f0000002000 ---p 00000000 00:00 0 \n", false}, /* reserved */
        {"7f0000000000-7f0000002000 rw-p 00000000 00:00 0                  [heap]\n", false},
        {"7f0000000000-7f0000002000 rw-p 00000000 00:00 0                  [stack]\n", false},
        {"7f0000000000-7f0000002000 r-xp 00001000 08:01 99          /usr/lib/libcuda.so.1\n", false},
        {"7f0000000000-7f0000002000 rw-s 00000000 00:05 99          /dev/nvidia0\n", false},
        {"7f0000000000-7f0000000000 rw-p 00000000 00:00 0 \n", false},
        {"7f0000002000-7f0000000000 rw-p 00000000 00:00 0 \n", false},
        {"7f0000000000-7f0000002000 rw-p\n", false},
        {"7f0000000000-7f0000002000 rw\n", false},
        {"7f0000000000\n", false},
        {"-1-2 rw-p 00000000 00:00 0 \n", false},
        {"\n", false},
        {"", false},
    };
    struct cuda_range range;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        char *copy = check_copy(cases[i].line, strlen(cases[i].line));
        CHECK(cuda_parse_mapping(copy, &range) == cases[i].counts);
        CHECK(!cases[i].counts || (range.start == 0x7f0000000000 && range.end == 0x7f0000002000));
        free(copy);
    }
    uint64_t state = 7;
    for (int i = 0; i < 20000; i++) {
        char *text = check_mangle(cases[(size_t)i % 5].line, &state);
        CHECK(!cuda_parse_mapping(text, &range) || range.start < range.end);
        free(text);
    }
}

/* Page by page, against the plain way. */
static void test_differences(void)
{
    enum { PAGES = 24, ROUNDS = 20000 };
    uint64_t state = 3;
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t bits[2] = {check_random(&state), check_random(&state) & check_random(&state)};
        struct cuda_range all[2][PAGES], found[PAGES];
        struct cuda_ranges ranges[2] = {{.at = all[0]}, {.at = all[1]}};
        for (int k = 0; k < 2; k++)
            for (unsigned page = 0; page < PAGES; page++) {
                if ((bits[k] >> page & 1) == 0)
                    continue;
                if (page > 0 && (bits[k] >> (page - 1) & 1) == 1)
                    all[k][ranges[k].count - 1].end = page + 1;
                else
                    all[k][ranges[k].count++] = (struct cuda_range){page, page + 1};
            }
        ssize_t count = cuda_ranges_new(&ranges[0], &ranges[1], found, PAGES);
        uint64_t got = 0;
        CHECK(count >= 0);
        for (ssize_t i = 0; i < count; i++) {
            CHECK(found[i].start < found[i].end && (i == 0 || found[i - 1].end < found[i].start));
            for (uint64_t page = found[i].start; page < found[i].end; page++)
                got |= 1ULL << page;
        }
        CHECK(got == (bits[1] & ~bits[0] & ((1ULL << PAGES) - 1)));
        CHECK(count == 0 || cuda_ranges_new(&ranges[0], &ranges[1], found, (size_t)count - 1) == -1);
    }
}

static void test_a_process(void)
{
    enum { SIZE = 1 << 20 };
    struct cuda_ranges before, after;
    struct cuda_range found[64];
    unsigned char *kept = mmap(NULL, (size_t)3 * SIZE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(kept != MAP_FAILED);
    CHECK(cuda_ranges_read(getpid(), &before));
    /* Memory that comes to where addresses were kept free. */
    CHECK(mprotect(kept + SIZE, SIZE, PROT_READ | PROT_WRITE) == 0);
    memset(kept + SIZE, 1, SIZE);
    CHECK(cuda_ranges_read(getpid(), &after));
    ssize_t count = cuda_ranges_new(&before, &after, found, 64);
    bool seen = false;
    for (ssize_t i = 0; i < count; i++)
        seen = seen || (found[i].start <= (uintptr_t)kept + SIZE && found[i].end >= (uintptr_t)kept + 2 * SIZE);
    CHECK(count > 0 && seen);
    CHECK(cuda_ranges_new(&after, &after, found, 0) == 0);
    cuda_ranges_free(&before);
    cuda_ranges_free(&after);
    munmap(kept, (size_t)3 * SIZE);
    CHECK(!cuda_ranges_read(-1, &before) && before.at == NULL);
}

int main(void)
{
    proc_open();
    test_lines();
    test_differences();
    test_a_process();
    return 0;
}
