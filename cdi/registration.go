package cdi

import "fmt"

// RegistrationVariable tells the programs of a container with a gpu= or nic= by
// which way GPU memory is registered with a NIC here.
const RegistrationVariable = "PEERLANE_REGISTRATION"

// Ways of registering GPU memory with a NIC, best first.
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

// Registration returns the best way to register GPU memory, and the reason why no better way is
// possible, empty for DMA-BUF. A distributor's kernel or driver may support more than the version
// says, and only a test shows whether a GPU and a NIC support a way
// (CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, ibv_reg_dmabuf_mr): a program starts with the way
// returned.
func (p Peermem) Registration() (way, reason string) {
	switch {
	case p.DMABUF:
		return registrationDMABUF, ""
	case p.Module != "":
		return registrationPeermem, fmt.Sprintf("there is %s, and no DMA-BUF: %s", p.Module, p.NoDMABUF)
	}
	return RegistrationBounce, fmt.Sprintf(
		"no NIC can reach a GPU's memory here: there is no DMA-BUF (%s), and nvidia-peermem is not loaded (modprobe "+
			"nvidia-peermem)",
		p.NoDMABUF,
	)
}
