/* rawsys.h — system calls that return -errno and touch neither errno nor any other thread-local variable.
 *
 * A child made by clone(CLONE_VM) shares the worker's memory, thread-local storage included, until it calls execve;
 * libc's wrappers would write the worker's errno. Sources: syscall(2), clone(2), Linux arch/.../entry.
 */
#ifndef VJ_RAWSYS_H
#define VJ_RAWSYS_H

#include <stdint.h>
#include <sys/syscall.h>

#if defined(__x86_64__)

static inline long raw6(long nr, long a, long b, long c, long d, long e, long f)
{
	long ret;
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = f;
	__asm__ volatile("syscall"
			 : "=a"(ret)
			 : "a"(nr), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
			 : "rcx", "r11", "memory");
	return ret;
}

/* clone(2) with a stack of the child's own: the child runs fn(arg), which never returns. */
static inline long raw_clone(unsigned long flags, void *stack_top, void (*fn)(void *), void *arg)
{
	long ret;
	register long r10 __asm__("r10") = 0;
	register long r8 __asm__("r8") = 0;
	register void (*r12)(void *) __asm__("r12") = fn;
	register void *r13 __asm__("r13") = arg;
	__asm__ volatile("syscall\n\t"
			 "test %%rax, %%rax\n\t"
			 "jnz 1f\n\t"
			 "xor %%ebp, %%ebp\n\t"
			 "mov %%r13, %%rdi\n\t"
			 "call *%%r12\n\t"
			 "hlt\n"
			 "1:"
			 : "=a"(ret)
			 : "a"((long)SYS_clone), "D"(flags), "S"(stack_top), "d"(0L), "r"(r10), "r"(r8), "r"(r12),
			   "r"(r13)
			 : "rcx", "r11", "memory");
	return ret;
}

#elif defined(__aarch64__)

static inline long raw6(long nr, long a, long b, long c, long d, long e, long f)
{
	register long x8 __asm__("x8") = nr;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = e;
	register long x5 __asm__("x5") = f;
	__asm__ volatile("svc 0"
			 : "+r"(x0)
			 : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5)
			 : "memory", "cc");
	return x0;
}

static inline long raw_clone(unsigned long flags, void *stack_top, void (*fn)(void *), void *arg)
{
	register long x8 __asm__("x8") = SYS_clone;
	register long x0 __asm__("x0") = (long)flags;
	register void *x1 __asm__("x1") = stack_top;
	register long x2 __asm__("x2") = 0;
	register long x3 __asm__("x3") = 0;
	register long x4 __asm__("x4") = 0;
	register void (*x9)(void *) __asm__("x9") = fn;
	register void *x10 __asm__("x10") = arg;
	__asm__ volatile("svc 0\n\t"
			 "cbnz x0, 1f\n\t"
			 "mov x29, xzr\n\t"
			 "mov x30, xzr\n\t"
			 "mov x0, x10\n\t"
			 "blr x9\n\t"
			 "brk 1\n"
			 "1:"
			 : "+r"(x0)
			 : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x9), "r"(x10)
			 : "memory", "cc");
	return x0;
}

#else
#error "the worker is written for x86_64 and aarch64"
#endif

#define raw0(nr) raw6(nr, 0, 0, 0, 0, 0, 0)
#define raw1(nr, a) raw6(nr, (long)(a), 0, 0, 0, 0, 0)
#define raw2(nr, a, b) raw6(nr, (long)(a), (long)(b), 0, 0, 0, 0)
#define raw3(nr, a, b, c) raw6(nr, (long)(a), (long)(b), (long)(c), 0, 0, 0)
#define raw4(nr, a, b, c, d) raw6(nr, (long)(a), (long)(b), (long)(c), (long)(d), 0, 0)
#define raw5(nr, a, b, c, d, e) raw6(nr, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), 0)

_Noreturn static inline void raw_exit(int code)
{
	for (;;)
		raw1(SYS_exit_group, code);
}

#endif
