package verbs

import (
	"strings"
	"syscall"
)

// Error is a call of libibverbs or librdmacm that failed. Error unwraps to the errno.
type Error struct {
	Call  string // "ibv_reg_mr"
	On    string // what it was made on, for people: "mlx5_0, 4096 bytes at 0x7f0000000000"
	Errno syscall.Errno
}

func (e *Error) Error() string {
	var b strings.Builder
	b.WriteString(e.Call)
	if e.On != "" {
		b.WriteString(" (" + e.On + ")")
	}
	b.WriteString(": " + e.Errno.Error())
	if name, ok := errnoNames[e.Errno]; ok {
		b.WriteString(" (" + name + ")")
	}
	if remedy := e.remedy(); remedy != "" {
		b.WriteString("; " + remedy)
	}
	return b.String()
}

// ErrorObject returns the call, as the object of an error of package wire.
func (e *Error) ErrorObject() string { return e.Call }

// Unwrap gives the errno, for [errors.Is].
func (e *Error) Unwrap() error { return e.Errno }

// errnoNames are the names in rdma-core's documentation.
var errnoNames = map[syscall.Errno]string{
	syscall.EPERM:           "EPERM",
	syscall.ENOENT:          "ENOENT",
	syscall.EIO:             "EIO",
	syscall.EBADF:           "EBADF",
	syscall.EAGAIN:          "EAGAIN",
	syscall.ENOMEM:          "ENOMEM",
	syscall.EACCES:          "EACCES",
	syscall.EFAULT:          "EFAULT",
	syscall.EBUSY:           "EBUSY",
	syscall.ENODEV:          "ENODEV",
	syscall.EINVAL:          "EINVAL",
	syscall.ENOSYS:          "ENOSYS",
	syscall.EPROTONOSUPPORT: "EPROTONOSUPPORT",
	syscall.EOPNOTSUPP:      "EOPNOTSUPP",
	syscall.ENETUNREACH:     "ENETUNREACH",
	syscall.ETIMEDOUT:       "ETIMEDOUT",
}

// remedy returns the remedy for an errno of the call, if known.
func (e *Error) remedy() string {
	switch e.Call {
	case "ibv_reg_mr", "ibv_reg_dmabuf_mr":
		switch e.Errno {
		case syscall.ENOMEM:
			return "locked memory is limited (ulimit -l): raise it, or give CAP_IPC_LOCK; or the NIC has no room for more " +
				"regions"
		case syscall.EFAULT:
			return "the memory is not there, is read-only though the NIC is to write it, or is a GPU's without nvidia-peermem"
		case syscall.EOPNOTSUPP, syscall.EPROTONOSUPPORT:
			return "the NIC's driver or the kernel (5.12 and newer) has no DMA-BUF support"
		}
	case "ibv_open_device":
		switch e.Errno {
		case syscall.EACCES, syscall.EPERM:
			return "the process may not open the NIC's node in /dev/infiniband"
		case syscall.ENOENT, syscall.ENODEV:
			return "the NIC's node in /dev/infiniband is not there, or no provider of rdma-core knows this NIC"
		}
	case "rdma_create_event_channel":
		switch e.Errno {
		case syscall.ENOENT, syscall.ENODEV:
			return "/dev/infiniband/rdma_cm is not there: load rdma_ucm"
		case syscall.EACCES, syscall.EPERM:
			return "the process may not open /dev/infiniband/rdma_cm"
		}
	case "ibv_get_device_list":
		if e.Errno == syscall.ENOSYS {
			return "the kernel has no RDMA: load ib_uverbs"
		}
	}
	return ""
}

// failed makes the error of a call that gave an errno, or nil for 0.
func failed(errno int32, call, on string) error {
	if errno == 0 {
		return nil
	}
	return &Error{Call: call, On: on, Errno: syscall.Errno(errno)}
}
