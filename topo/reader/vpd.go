package reader

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"strings"

	"github.com/peerlane/peerlane/topo"
	"github.com/peerlane/peerlane/topo/internal/pci"
)

// hasProduct reports whether the vital product data of a PCI function is read. Reading takes
// milliseconds, because firmware answers.
func hasProduct(id topo.PCIIdentity) bool {
	if id.Vendor != pci.VendorMellanox {
		return false
	}
	switch id.Device {
	case pci.DeviceConnectX7, pci.DeviceConnectX8, pci.DeviceBlueField3, pci.DeviceDataDirect:
		return true
	}
	return false
}

// product is the part of the vital product data of a function that marks the purpose of the
// function.
type product struct {
	// card is the UUID in keyword V3, which the functions of a ConnectX share; empty if unknown.
	// rdma_topo of rdma-core also matches functions by the UUID.
	card string
	// management is set for the bridge to NVSwitches on boards with B200 and B300:
	// a keyword has SMDL=SW_MNG.
	management bool
}

// Tags of vital product data (PCI Local Bus Specification 3.0, appendix I).
const (
	vpdLarge    = 0x80
	vpdReadOnly = 0x90
	vpdEndSmall = 0x78
	vpdEndLarge = 0x79
)

// maxVPD is the limit on bytes of vital product data; an address in vital product data has 15
// bits.
const maxVPD = 1 << 15

// readVPD reads vital product data item by item up to the end tag, because reading bytes after the
// end tag takes time.
func readVPD(from io.ReaderAt) ([]byte, error) {
	var data []byte
	for len(data) < maxVPD {
		head := make([]byte, 3)
		n, err := from.ReadAt(head, int64(len(data)))
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
		if n == 0 || head[0] == vpdEndSmall || head[0] == vpdEndLarge || head[0] == 0 {
			break
		}
		length := 1 + int(head[0]&7)
		if head[0]&vpdLarge != 0 {
			if n < len(head) {
				break
			}
			length = len(head) + int(binary.LittleEndian.Uint16(head[1:]))
		}
		item := make([]byte, min(length, maxVPD-len(data)))
		n, err = from.ReadAt(item, int64(len(data)))
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
		data = append(data, item[:n]...)
		if n < length {
			break
		}
	}
	return data, nil
}

// parseVPD parses the output of readVPD. parseVPD uses the whole items of torn data.
func parseVPD(data []byte) (p product) {
	for len(data) > 0 {
		tag, skip, length := data[0], 1, int(data[0]&7)
		if tag&vpdLarge != 0 {
			if len(data) < 3 {
				return p
			}
			skip, length = 3, int(binary.LittleEndian.Uint16(data[1:]))
		}
		if tag == vpdEndSmall || tag == vpdEndLarge || length > len(data)-skip {
			return p
		}
		if tag == vpdReadOnly {
			p.addKeywords(data[skip : skip+length])
		}
		data = data[skip+length:]
	}
	return p
}

func (p *product) addKeywords(data []byte) {
	for len(data) >= 3 {
		length := int(data[2])
		if length > len(data)-3 {
			return
		}
		value := data[3 : 3+length]
		if string(data[:2]) == "V3" {
			p.card = strings.TrimRight(string(value), " \x00")
		}
		if bytes.Contains(value, []byte(pci.ManagementProperty)) {
			p.management = true
		}
		data = data[3+length:]
	}
}

// reduced returns vital product data for a capture: with the marks of p, and without serial number
// and UUID. nil without marks.
func (p product) reduced() []byte {
	var keywords []byte
	add := func(keyword, value string) {
		keywords = append(append(append(keywords, keyword...), byte(len(value))), value...)
	}
	if p.card != "" {
		sum := sha256.Sum256([]byte(p.card))
		add("V3", hex.EncodeToString(sum[:8]))
	}
	if p.management {
		add("VA", "SMDL="+pci.ManagementProperty)
	}
	if keywords == nil {
		return nil
	}
	item := binary.LittleEndian.AppendUint16([]byte{vpdReadOnly}, uint16(len(keywords)))
	return append(append(item, keywords...), vpdEndSmall)
}

// product reads the vital product data of a PCI function. The result is empty for a function
// without vital product data. The kernel shows vital product data to root only; for other users,
// product writes a note.
func (s *sysfs) product(device string, id topo.PCIIdentity) (product, error) {
	if !hasProduct(id) {
		return product{}, nil
	}
	f, err := s.files.Open(s.path("bus/pci/devices", device, "vpd"))
	var data []byte
	if err == nil {
		data, err = readVPD(f)
		_ = f.Close() // opened for reading: closing loses nothing
	}
	switch {
	case gone(err):
		return product{}, nil
	case errors.Is(err, fs.ErrPermission):
		if !s.noVPD {
			s.noVPD = true
			s.host.Note("only root can read vital product data (%s): whether NICs are management bridges of NVSwitches, and "+
				"which Data Direct functions belong to them, is unknown", s.path("bus/pci/devices", device, "vpd"))
		}
		return product{}, nil
	case refused(err):
		s.host.Note("the vital product data of PCI function %s cannot be read, and counts as unknown: %v", device, err)
		return product{}, nil
	}
	return parseVPD(data), err
}

// findDataDirect finds the Data Direct functions of NICs. A ConnectX-8 accesses GPU memory through
// a Data Direct function, not through the function of the NIC. cards maps the name of a NIC to the
// UUID of the card.
func (s *sysfs) findDataDirect(cards map[string]string) error {
	if len(cards) == 0 {
		return nil
	}
	names, err := s.list("bus/pci/devices")
	if err != nil {
		return err
	}
	functions := map[string]string{} // by the UUID of the card
	for _, name := range names {
		id := topo.PCIIdentity{Vendor: pci.VendorMellanox, Device: pci.DeviceDataDirect}
		device, err := s.pciAttribute(name, "device")
		if err != nil {
			return err
		}
		if device != id.Device {
			continue
		}
		vendor, err := s.pciAttribute(name, "vendor")
		if err != nil {
			return err
		}
		if vendor != id.Vendor {
			continue
		}
		p, err := s.product(name, id)
		if err != nil {
			return err
		}
		switch driver := s.driver(name); {
		case p.card == "":
		case !strings.HasPrefix(driver, "mlx5"): // mlx5_ib, or mlx5_dd of older drivers
			s.host.Note("Data Direct function %s has %s and is not used: NICs reach GPUs by their own functions; Linux's "+
				"mlx5_ib binds it from 6.12 on", name, driverWords(driver))
		default:
			functions[p.card] = name
		}
	}
	for i := range s.host.NICs {
		nic := &s.host.NICs[i]
		function := functions[cards[nic.Name]]
		if function == "" || cards[nic.Name] == "" {
			continue
		}
		nic.Own = &topo.Function{NUMA: nic.NUMA, Place: nic.Place}
		nic.DataDirect = function
		if nic.NUMA, nic.Place, err = s.place(function); err != nil {
			return err
		}
	}
	return nil
}

func driverWords(driver string) string {
	if driver == "" {
		return "no driver"
	}
	return "driver " + driver
}
