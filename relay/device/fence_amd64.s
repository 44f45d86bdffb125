#include "textflag.h"

TEXT ·fence(SB), NOSPLIT, $0-0
	SFENCE
	RET
