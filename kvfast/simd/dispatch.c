/* Finds out which tiers this machine can run. */
#include "common.h"

#include <string.h>

#if KV_X86
#include <cpuid.h>
#if KV_HAVE_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif KV_ARM64 && defined(__linux__)
#include <sys/auxv.h>
#elif KV_ARM64 && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

int kv_prefetch_level = KV_PREFETCH_LEVEL;

#define KV_SIGN(i) __builtin_parity((i) & (i) >> 1) ? -1.0f : 1.0f,
#define KV_SIGNS_4(i) KV_SIGN(i) KV_SIGN((i) + 1) KV_SIGN((i) + 2) KV_SIGN((i) + 3)
#define KV_SIGNS_16(i) KV_SIGNS_4(i) KV_SIGNS_4((i) + 4) KV_SIGNS_4((i) + 8) KV_SIGNS_4((i) + 12)
#define KV_SIGNS_64(i) KV_SIGNS_16(i) KV_SIGNS_16((i) + 16) KV_SIGNS_16((i) + 32) KV_SIGNS_16((i) + 48)
#define KV_SIGNS_256(i) KV_SIGNS_64(i) KV_SIGNS_64((i) + 64) KV_SIGNS_64((i) + 128) KV_SIGNS_64((i) + 192)
const float kv_signs[KV_MAX_HEAD_DIM] = {KV_SIGNS_256(0) KV_SIGNS_256(256)};

#define KV_ADDRESS(tier) &kv_kernels_##tier,
const kv_kernels *const kv_all_kernels[] = {KV_TIERS(KV_ADDRESS) NULL};

#define KV_PAIR(fast, exact) {&kv_kernels_##fast, &kv_kernels_##exact},
static const kv_kernels *const own_of_fast[][2] = {KV_FAST_TIERS(KV_PAIR) {NULL, NULL}};
static kv_kernels fast_kernels[sizeof kv_all_kernels / sizeof *kv_all_kernels];

#if KV_X86
/* clang's __builtin_cpu_supports does not know these features. A CPU that has one and AVX2 may use it. */
static int has_f16c(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}
static int has_avx_vnni(void)
{
#ifdef KV_SOFTWARE_AVX512 /* a build for tests, see ci/software_tiers.sh */
    return 1;
#endif
    enum { AVX_VNNI = 1 << 4 };
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & AVX_VNNI) != 0;
}
#endif

#if KV_ARM64
#if defined(__APPLE__)
static int has_feature(const char *name)
{
    int present = 0;
    size_t size = sizeof present;
    return sysctlbyname(name, &present, &size, NULL, 0) == 0 && present;
}
#endif

static int has_dotprod(void)
{
#if defined(__linux__)
    enum { DOT_PRODUCTS = 1 << 20 }; /* HWCAP_ASIMDDP */
    return (getauxval(AT_HWCAP) & DOT_PRODUCTS) != 0;
#elif defined(__APPLE__)
    return has_feature("hw.optional.arm.FEAT_DotProd");
#elif defined(__ARM_FEATURE_DOTPROD)
    return 1;
#else
    return 0;
#endif
}

static int has_i8mm(void)
{
#if defined(__linux__)
    enum { MATRIX_PRODUCTS = 1 << 13 }; /* HWCAP2_I8MM */
    return (getauxval(AT_HWCAP2) & MATRIX_PRODUCTS) != 0;
#elif defined(__APPLE__)
    return has_feature("hw.optional.arm.FEAT_I8MM");
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return 1;
#else
    return 0;
#endif
}

static int has_bf16(void)
{
#if defined(__linux__)
    enum { BFLOAT16_PRODUCTS = 1 << 14 }; /* HWCAP2_BF16 */
    return (getauxval(AT_HWCAP2) & BFLOAT16_PRODUCTS) != 0;
#elif defined(__APPLE__)
    return has_feature("hw.optional.arm.FEAT_BF16");
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return 1;
#else
    return 0;
#endif
}
#endif

#if KV_HAVE_AMX
/* The matrix unit's registers are large: Linux gives them only to processes that ask for them (arch_prctl,
   ARCH_REQ_XCOMP_PERM for XFEATURE_XTILEDATA); asking once is enough. */
static int has_amx(void)
{
#ifdef KV_SOFTWARE_AMX
    return 1;
#endif
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18, AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24, AMX_INT8 = 1 << 25 };
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AMX_TILE) && (d & AMX_INT8) && (d & AMX_BF16) &&
           syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

int kv_supported(const kv_kernels *kernels)
{
#if KV_HAVE_AMX
    if (kernels == &kv_kernels_amx) return kv_supported(&kv_kernels_avx512_vbmi) && has_amx();
#endif
#if KV_X86
    /* __builtin_cpu_supports also asks the operating system (XCR0) for the wider registers. */
    __builtin_cpu_init();
    if (kernels == &kv_kernels_avx512_vbmi)
        return kv_supported(&kv_kernels_avx512_vnni) && __builtin_cpu_supports("avx512vbmi");
    if (kernels == &kv_kernels_avx512_vnni)
        return kv_supported(&kv_kernels_avx512) && __builtin_cpu_supports("avx512vnni");
    if (kernels == &kv_kernels_avx512)
        return kv_supported(&kv_kernels_avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("popcnt");
#if KV_HAVE_AVX_VNNI
    if (kernels == &kv_kernels_avx_vnni) return kv_supported(&kv_kernels_avx2) && has_avx_vnni();
#endif
    if (kernels == &kv_kernels_avx2)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
#endif
#if KV_HAVE_BF16
    if (kernels == &kv_kernels_neon_bf16) return has_i8mm() && has_bf16();
#endif
#if KV_HAVE_I8MM
    if (kernels == &kv_kernels_neon_i8mm) return has_i8mm();
#endif
#if KV_HAVE_DOTPROD
    if (kernels == &kv_kernels_neon_dotprod) return has_dotprod();
#endif
    (void)kernels;
    return 1;
}

/* Gives a table what it has not and another one has. A table is a row of pointers; has_matrix takes the place of one. */
static void complete(kv_kernels *table, const kv_kernels *from)
{
    static const char nothing[sizeof(void *)];
    for (size_t at = 0; at < sizeof *table; at += sizeof nothing)
        if (!memcmp((char *)table + at, nothing, sizeof nothing)) memcpy((char *)table + at, (const char *)from + at, sizeof nothing);
}

void kv_begin(void)
{
    int num_tiers = 0;
    while (kv_all_kernels[num_tiers]) num_tiers++;
    for (int i = 0; i < num_tiers; i++)
        if (kv_all_kernels[i]->base) complete((kv_kernels *)kv_all_kernels[i], kv_all_kernels[i]->base);
    for (int j = 0; own_of_fast[j][0]; j++) complete((kv_kernels *)kv_fast(own_of_fast[j][1]), own_of_fast[j][0]);
    for (int i = 0; i < num_tiers; i++) {
        complete(fast_kernels + i, kv_all_kernels[i]);
        ((kv_kernels *)kv_all_kernels[i])->exact = fast_kernels[i].exact = kv_all_kernels[i];
    }
}

const kv_kernels *kv_fast(const kv_kernels *exact)
{
    int i = 0;
    while (kv_all_kernels[i] != exact) i++;
    return fast_kernels + i;
}

kv_cpu_identity kv_identify_cpu(void)
{
    kv_cpu_identity cpu = {"", 0, 0};
#if KV_X86
    unsigned a, b, c, d;
    if (__get_cpuid(0, &a, &b, &c, &d)) {
        const unsigned words[3] = {b, d, c};
        memcpy(cpu.vendor, words, sizeof words);
    }
    if (__get_cpuid(1, &a, &b, &c, &d)) {
        cpu.family = (int)(a >> 8 & 15), cpu.model = (int)(a >> 4 & 15);
        if (cpu.family == 6 || cpu.family == 15) cpu.model += (int)(a >> 16 & 15) << 4;
        if (cpu.family == 15) cpu.family += (int)(a >> 20 & 255);
    }
#endif
    return cpu;
}

const kv_cpu_feature *kv_cpu_features(void)
{
    static kv_cpu_feature features[] = {
#if KV_X86
        {"sse2", 0}, {"avx", 0}, {"fma", 0}, {"avx2", 0}, {"avx512f", 0}, {"avx512bw", 0},
        {"avx512dq", 0}, {"avx512vl", 0}, {"avx512vnni", 0}, {"avx512vbmi", 0}, {"avx512bf16", 0},
        {"avxvnni", 0},
#endif
#if KV_HAVE_AMX
        {"amx_int8", 0}, {"amx_bf16", 0},
#endif
#if KV_ARM64
        {"neon", 1}, {"dotprod", 0}, {"i8mm", 0}, {"bf16", 0},
#endif
        {NULL, 0}};
#if KV_X86
    kv_cpu_feature *f = features;
    __builtin_cpu_init();
#define KV_FEATURE(name) (f++)->present = __builtin_cpu_supports(name) != 0;
    KV_FEATURE("sse2") KV_FEATURE("avx") KV_FEATURE("fma") KV_FEATURE("avx2")
    KV_FEATURE("avx512f") KV_FEATURE("avx512bw") KV_FEATURE("avx512dq") KV_FEATURE("avx512vl")
    KV_FEATURE("avx512vnni") KV_FEATURE("avx512vbmi") KV_FEATURE("avx512bf16")
    (f++)->present = __builtin_cpu_supports("avx2") && has_avx_vnni();
#endif
#if KV_HAVE_AMX
    f[0].present = f[1].present = kv_supported(&kv_kernels_amx); /* needs the system's permission as well */
#endif
#if KV_ARM64
    features[1].present = has_dotprod();
    features[2].present = has_i8mm();
    features[3].present = has_bf16();
#endif
    return features;
}
