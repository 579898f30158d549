/* Computes the digest of a tensor (the 128-bit hash that definition.py defines) on CPUs, for DMR. Uses neither Python
 * nor torch: native.py loads the library with ctypes.
 *
 * Four blocks are processed side by side, so that a key is loaded once for four words: the loop is bound by its
 * multiplications and reads memory as fast as one core can. Threads are started per call and joined before it returns,
 * so that a later fork finds no threads; they are worth their cost from a few MiB on.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the digest's words are little-endian"
#endif

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
#define X86 1
#else
#define X86 0
#endif

enum { WORDS = 4096, BLOCK = 4 * WORDS, LEVELS = 4, SIDE = 4, MAX_THREADS = 64 };
#define THREAD_BYTES ((uint64_t)2 << 20) /* a thread for fewer bytes costs more than it gains */

/* Adds to out[2 r + c] the sums of `words` words (a multiple of 8) of `rows` blocks. */
typedef void (*tile_t)(const unsigned char *data, size_t words, int rows, const int64_t *keys, uint64_t *out);

static void tile_plain(const unsigned char *data, size_t words, int rows, const int64_t *keys, uint64_t *out) {
    for (int r = 0; r < rows; r++) {
        const unsigned char *row = data + (size_t)r * BLOCK;
        uint64_t a = 0, b = 0;
        for (size_t i = 0; i < words; i++) {
            int32_t word;
            memcpy(&word, row + 4 * i, 4);
            a += (uint64_t)(int64_t)word * (uint64_t)keys[i];
            b += (uint64_t)(int64_t)word * (uint64_t)keys[WORDS + i];
        }
        out[2 * r] += a;
        out[2 * r + 1] += b;
    }
}

#if X86
#define AVX512 __attribute__((target("avx512f,avx512dq")))
#define AVX2 __attribute__((target("avx2")))
#define INLINED static inline __attribute__((always_inline))

AVX512 INLINED uint64_t lanes_avx512(__m512i sum) {
    uint64_t lane[8]; /* the compilers' own reduction adds signed numbers, whose overflow is undefined in C */
    _mm512_storeu_si512(lane, sum);
    return lane[0] + lane[1] + lane[2] + lane[3] + lane[4] + lane[5] + lane[6] + lane[7];
}

AVX512 INLINED void rows_avx512(const unsigned char *data, size_t words, const int rows, const int64_t *keys,
                                uint64_t *out) {
    __m512i a[SIDE], b[SIDE];
    for (int r = 0; r < rows; r++) a[r] = b[r] = _mm512_setzero_si512();
    for (size_t i = 0; i < words; i += 8) {
        const __m512i x = _mm512_loadu_si512(keys + i), y = _mm512_loadu_si512(keys + WORDS + i);
        for (int r = 0; r < rows; r++) {
            const __m256i narrow = _mm256_loadu_si256((const __m256i *)(data + (size_t)r * BLOCK + 4 * i));
            const __m512i word = _mm512_cvtepi32_epi64(narrow);
            a[r] = _mm512_add_epi64(a[r], _mm512_mullo_epi64(word, x));
            b[r] = _mm512_add_epi64(b[r], _mm512_mullo_epi64(word, y));
        }
    }
    for (int r = 0; r < rows; r++) {
        out[2 * r] += lanes_avx512(a[r]);
        out[2 * r + 1] += lanes_avx512(b[r]);
    }
}

AVX512 static void tile_avx512(const unsigned char *data, size_t words, int rows, const int64_t *keys, uint64_t *out) {
    if (rows == SIDE) {
        rows_avx512(data, words, SIDE, keys, out);
    } else {
        for (int r = 0; r < rows; r++) rows_avx512(data + (size_t)r * BLOCK, words, 1, keys, out + 2 * r);
    }
}

/* AVX2 multiplies 32 by 32 bits: key = low (signed) + 2^32 high, and the high halves are summed separately. */
typedef struct {
    __m256i low, high;
} split_t;

AVX2 INLINED split_t split_key(const int64_t *key) {
    const __m256i low = _mm256_loadu_si256((const __m256i *)key);
    const split_t split = {low, _mm256_srli_epi64(_mm256_add_epi64(low, _mm256_set1_epi64x(0x80000000LL)), 32)};
    return split;
}

AVX2 INLINED void add_product(split_t *sum, __m256i word, split_t key) {
    sum->low = _mm256_add_epi64(sum->low, _mm256_mul_epi32(word, key.low));
    sum->high = _mm256_add_epi64(sum->high, _mm256_mul_epi32(word, key.high));
}

AVX2 INLINED uint64_t joined(split_t sum) {
    uint64_t lane[4];
    _mm256_storeu_si256((__m256i *)lane, _mm256_add_epi64(sum.low, _mm256_slli_epi64(sum.high, 32)));
    return lane[0] + lane[1] + lane[2] + lane[3];
}

AVX2 INLINED void rows_avx2(const unsigned char *data, size_t words, const int rows, const int64_t *keys,
                            uint64_t *out) {
    split_t a[SIDE], b[SIDE];
    for (int r = 0; r < rows; r++) a[r].low = a[r].high = b[r].low = b[r].high = _mm256_setzero_si256();
    for (size_t i = 0; i < words; i += 4) {
        const split_t x = split_key(keys + i), y = split_key(keys + WORDS + i);
        for (int r = 0; r < rows; r++) {
            const __m128i narrow = _mm_loadu_si128((const __m128i *)(data + (size_t)r * BLOCK + 4 * i));
            const __m256i word = _mm256_cvtepi32_epi64(narrow);
            add_product(&a[r], word, x);
            add_product(&b[r], word, y);
        }
    }
    for (int r = 0; r < rows; r++) {
        out[2 * r] += joined(a[r]);
        out[2 * r + 1] += joined(b[r]);
    }
}

AVX2 static void tile_avx2(const unsigned char *data, size_t words, int rows, const int64_t *keys, uint64_t *out) {
    int r = 0; /* two blocks side by side: four would not fit into sixteen registers */
    for (; r + 2 <= rows; r += 2) rows_avx2(data + (size_t)r * BLOCK, words, 2, keys, out + 2 * r);
    for (; r < rows; r++) rows_avx2(data + (size_t)r * BLOCK, words, 1, keys, out + 2 * r);
}
#endif

enum { PLAIN = 0, WITH_AVX2 = 2, WITH_AVX512 = 512 };

/* Returns the widest instructions that this processor has: 512, 2 (AVX2) or 0 (plain C). */
int ft_widest(void) {
#if X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) return WITH_AVX512;
    if (__builtin_cpu_supports("avx2")) return WITH_AVX2;
#endif
    return PLAIN;
}

static tile_t tile_for(int width) {
#if X86
    if (width == WITH_AVX512) return tile_avx512;
    if (width == WITH_AVX2) return tile_avx2;
#endif
    (void)width;
    return tile_plain;
}

typedef struct {
    const unsigned char *data;
    uint64_t bytes;
    const int64_t *keys;
    uint64_t *out;
    tile_t tile;
} part_t;

/* Computes both sums of every block of a part; only its last block may be shorter. */
static void *hash_part(void *argument) {
    const part_t part = *(const part_t *)argument;
    const uint64_t whole = part.bytes / BLOCK, rest = part.bytes % BLOCK;
    memset(part.out, 0, 16 * (whole + (rest > 0)));
    for (uint64_t block = 0; block < whole; block += SIDE) {
        const int rows = whole - block < SIDE ? (int)(whole - block) : SIDE;
        part.tile(part.data + block * BLOCK, WORDS, rows, part.keys, part.out + 2 * block);
    }
    if (rest > 0) {
        const unsigned char *data = part.data + whole * BLOCK;
        uint64_t *out = part.out + 2 * whole;
        const size_t wide = rest / 32 * 8, left = rest - 4 * wide; /* left < 32 bytes */
        unsigned char padded[32] = {0};
        memcpy(padded, data + 4 * wide, left);
        part.tile(data, wide, 1, part.keys, out);
        tile_plain(padded, (left + 3) / 4, 1, part.keys + wide, out);
    }
    return NULL;
}

/* Hashes one level, its blocks divided among threads. The calling thread does the part of one that does not start. */
static void hash_level(part_t all, int threads) {
    part_t parts[MAX_THREADS];
    pthread_t started[MAX_THREADS];
    const uint64_t blocks = (all.bytes + BLOCK - 1) / BLOCK, worth = all.bytes / THREAD_BYTES;
    uint64_t count = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : (uint64_t)threads;
    if (count > worth) count = worth > 0 ? worth : 1;
    const uint64_t share = (blocks + count - 1) / count;
    uint64_t running = 0;
    for (uint64_t i = 0; i < count && i * share < blocks; i++) {
        const uint64_t from = i * share * BLOCK, left = all.bytes - from;
        parts[i] = all;
        parts[i].data = all.data + from;
        parts[i].bytes = left < share * BLOCK ? left : share * BLOCK;
        parts[i].out = all.out + 2 * i * share;
        const int last = (i + 1) * share >= blocks;
        if (last || pthread_create(&started[running], NULL, hash_part, &parts[i]) != 0)
            hash_part(&parts[i]);
        else
            running++;
    }
    for (uint64_t i = 0; i < running; i++) pthread_join(started[i], NULL);
}

/* Writes the digest of `bytes` bytes into out[2]. keys: [LEVELS][2][WORDS]. width: as ft_widest() returns, or less.
 * Returns 0, 1 (no memory) or 2 (more than LEVELS levels). */
int ft_digest(const void *data, uint64_t bytes, const int64_t *keys, int64_t head0, int64_t head1, int64_t *out,
              int threads, int width) {
    uint64_t *before = NULL, last[2] = {0, 0};
    part_t part = {(const unsigned char *)data, bytes, keys, last, tile_for(width)};
    for (int level = 0; part.bytes > BLOCK; level++) {
        const uint64_t blocks = (part.bytes + BLOCK - 1) / BLOCK;
        uint64_t *numbers = level + 1 < LEVELS ? malloc(16 * blocks) : NULL;
        if (numbers == NULL) {
            free(before);
            return level + 1 < LEVELS ? 1 : 2;
        }
        part.out = numbers;
        hash_level(part, threads);
        free(before);
        before = numbers;
        part.data = (const unsigned char *)numbers;
        part.bytes = 16 * blocks;
        part.keys += 2 * WORDS;
    }
    part.out = last;
    hash_part(&part);
    free(before);
    out[0] = (int64_t)(last[0] + (uint64_t)head0);
    out[1] = (int64_t)(last[1] + (uint64_t)head1);
    return 0;
}
