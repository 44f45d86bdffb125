package sim

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

// maxDevices of a simulated host (MAX_DEVICES of libcuda/sim.h).
const maxDevices = 64

// Device is a simulated GPU.
type Device struct {
	Index  int    // NVML's index
	Minor  int    // N of /dev/nvidiaN
	UUID   string // "GPU-8-4-4-4-12"
	BusID  string // "0000:17:00.0"
	Memory uint64 // bytes
	Name   string // "NVIDIA H100 80GB HBM3"
}

// DeviceLog counts the traffic and the objects of a device since [Write], over all processes,
// including dead ones. A copy counts after the data has arrived.
type DeviceLog struct {
	Device
	BytesIn     uint64 // copied from another device or the host
	BytesOut    uint64 // copied to another device or the host
	BytesWithin uint64 // copied within the device
	Copies      uint64 // with the device as an end
	Contexts    uint64 // contexts created on the device
	Allocated   uint64 // bytes allocated on the device
	Slices      uint64 // calls whose work waits for time slices of other processes' kernels
}

var (
	uuidForm  = regexp.MustCompile(`^GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
	busIDForm = regexp.MustCompile(`^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.0$`)
)

func (d Device) check() error {
	switch {
	case !uuidForm.MatchString(d.UUID):
		return fmt.Errorf("UUID %q is not GPU-8-4-4-4-12 lower-case hexadecimal digits", d.UUID)
	case !busIDForm.MatchString(d.BusID):
		return fmt.Errorf("PCI address %q is not of the form 0000:17:00.0, lower case", d.BusID)
	case d.Memory == 0:
		return errors.New("no memory")
	case strings.TrimSpace(d.Name) == "" || strings.ContainsAny(d.Name, "\n"):
		return fmt.Errorf("name %q is not a line of text", d.Name)
	case d.Index < 0 || d.Minor < 0:
		return fmt.Errorf("negative index %d or minor number %d", d.Index, d.Minor)
	}
	return nil
}

// The log's layout, that of log_header and device_log in libcuda.
const (
	logMagic   = 0x474f4c4d4953504c // "LPSIMLOG"
	logVersion = 1
	logHeader  = 64
	logRecord  = 64
)

// Write creates a simulated host with the devices in dir. The log is writable for every user,
// because relays and containers run as different users.
func Write(dir string, devices []Device) error {
	if len(devices) == 0 || len(devices) > maxDevices {
		return fmt.Errorf("simulated host %s: %d devices; must be 1 to %d", dir, len(devices), maxDevices)
	}
	var b strings.Builder
	b.WriteString("# index minor uuid pci-address memory-bytes name\n")
	seen := map[string]bool{}
	for _, d := range devices {
		if err := d.check(); err != nil {
			return fmt.Errorf("simulated host %s: device %d: %w", dir, d.Index, err)
		}
		minor := fmt.Sprintf("minor %d", d.Minor)
		if seen[d.UUID] || seen[d.BusID] || seen[minor] {
			return fmt.Errorf("simulated host %s: device %d: duplicate UUID, PCI address or minor number", dir, d.Index)
		}
		seen[d.UUID], seen[d.BusID], seen[minor] = true, true, true
		fmt.Fprintf(&b, "%d %d %s %s %d %s\n", d.Index, d.Minor, d.UUID, d.BusID, d.Memory, d.Name)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, "host"), []byte(b.String()), 0o644); err != nil {
		return err
	}
	log := make([]byte, logHeader+logRecord*len(devices))
	binary.LittleEndian.PutUint64(log, logMagic)
	binary.LittleEndian.PutUint32(log[8:], logVersion)
	binary.LittleEndian.PutUint32(log[12:], uint32(len(devices)))
	path := filepath.Join(dir, "log")
	if err := os.WriteFile(path, log, 0o666); err != nil {
		return err
	}
	return os.Chmod(path, 0o666)
}

// ReadLog reads the counters of the simulated host in dir, in the order of the devices in [Write].
func ReadLog(dir string) ([]DeviceLog, error) {
	devices, err := readHost(filepath.Join(dir, "host"))
	if err != nil {
		return nil, err
	}
	path := filepath.Join(dir, "log")
	log, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if len(log) < logHeader+logRecord*len(devices) || binary.LittleEndian.Uint64(log) != logMagic {
		return nil, fmt.Errorf("%s: not the log of a simulated host with %d devices", path, len(devices))
	}
	if v := binary.LittleEndian.Uint32(log[8:]); v != logVersion {
		return nil, fmt.Errorf("%s: version %d; this program reads %d", path, v, logVersion)
	}
	logs := make([]DeviceLog, len(devices))
	for i, d := range devices {
		counter := func(n int) uint64 {
			return binary.LittleEndian.Uint64(log[logHeader+logRecord*i+8*n:])
		}
		logs[i] = DeviceLog{d, counter(0), counter(1), counter(2), counter(3), counter(4), counter(5), counter(6)}
	}
	return logs, nil
}

func readHost(path string) ([]Device, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var devices []Device
	for line := range strings.Lines(string(text)) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		var d Device
		fields := strings.SplitN(line, " ", 6)
		if len(fields) == 6 {
			d.Name = fields[5]
			_, err = fmt.Sscan(strings.Join(fields[:5], " "), &d.Index, &d.Minor, &d.UUID, &d.BusID, &d.Memory)
		}
		if len(fields) != 6 || err != nil {
			return nil, fmt.Errorf("%s: not a device: %s", path, line)
		}
		devices = append(devices, d)
	}
	return devices, nil
}
