#include "textflag.h"

TEXT ·pause(SB), NOSPLIT, $0-0
	PAUSE
	RET
