package cdi

import "fmt"

// RegistrationVariable tells the programs of a container with a gpu= or nic= by
// which way GPU memory is registered with a NIC here.
const RegistrationVariable = "PEERLANE_REGISTRATION"

// Ways of registering GPU memory with a NIC, best first.
const (
	// registrationDMABUF is by a DMA-BUF descriptor of it (ibv_reg_dmabuf_mr).
	registrationDMABUF = "dmabuf"
	// registrationPeermem is by its address (ibv_reg_mr), which the module
	// nvidia-peermem, or nv_peer_mem before it, makes out.
	registrationPeermem = "peermem"
	// RegistrationBounce is not at all: host memory is registered, and data is
	// copied through it.
	RegistrationBounce = "bounce"
)

// Registration is the best way of registering GPU memory, and why it is not a
// better one, a sentence that is empty for DMA-BUF. A kernel or driver that a
// distributor has changed may do more than its number says, and whether one GPU
// and one NIC do it, only trying tells (CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED,
// ibv_reg_dmabuf_mr): it is where a program begins.
func (p Peermem) Registration() (way, reason string) {
	switch {
	case p.DMABUF:
		return registrationDMABUF, ""
	case p.Module != "":
		return registrationPeermem, fmt.Sprintf("there is %s, and no DMA-BUF: %s", p.Module, p.NoDMABUF)
	}
	return RegistrationBounce, fmt.Sprintf("no NIC can reach a GPU's memory here: there is no DMA-BUF (%s), and nvidia-peermem is not loaded (modprobe nvidia-peermem)", p.NoDMABUF)
}
