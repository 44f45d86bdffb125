package device

const hasFence = true

// fence empties the processor's write-combining buffers, in which stores to BAR1 wait.
func fence()
