package cdi

import "fmt"

// RegistrationVariable is the environment variable that tells programs in a container with gpu= or
// nic= how to register GPU memory with a NIC on this host.
const RegistrationVariable = "PEERLANE_REGISTRATION"

// Methods to register GPU memory with a NIC, best first.
const (
	// registrationDMABUF registers a DMA-BUF descriptor of the memory (ibv_reg_dmabuf_mr).
	registrationDMABUF = "dmabuf"
	// registrationPeermem registers the address of the memory (ibv_reg_mr); the module
	// nvidia-peermem, or nv_peer_mem, resolves the address.
	registrationPeermem = "peermem"
	// RegistrationBounce registers host memory instead, and relays copy the data through host
	// memory.
	RegistrationBounce = "bounce"
)

// Registration returns the best method to register GPU memory, and the reason why no better method
// is possible, empty for DMA-BUF. The result is a hint: a distributor's kernel or driver may
// support more than its version suggests, and only a test shows whether a GPU and a NIC support a
// method (CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, ibv_reg_dmabuf_mr).
func (p Peermem) Registration() (method, reason string) {
	switch {
	case p.DMABUF:
		return registrationDMABUF, ""
	case p.Module != "":
		return registrationPeermem, fmt.Sprintf("%s is loaded, and DMA-BUF is not available: %s", p.Module, p.NoDMABUF)
	}
	return RegistrationBounce, fmt.Sprintf(
		"no NIC can reach GPU memory on this host: DMA-BUF is not available (%s), and nvidia-peermem is not loaded "+
			"(modprobe nvidia-peermem)",
		p.NoDMABUF,
	)
}
