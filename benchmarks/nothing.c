/* nothing.c — a program that costs nothing to start: static, without a C library. cc -static -nostdlib */
void _start(void);

void _start(void)
{
#if defined __x86_64__
	__asm__ volatile("xor %edi, %edi\n\tmov $60, %eax\n\tsyscall");
#elif defined __aarch64__
	__asm__ volatile("mov x0, #0\n\tmov x8, #93\n\tsvc #0");
#endif
	for (;;)
		;
}
