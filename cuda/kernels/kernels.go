// Package kernels has the kernels that Peerlane tests and measures GPUs with:
// a pattern that is written and compared, a reader that runs while bytes
// arrive, and load for the SMs and for the memory.
//
// The kernels are PTX, which the driver compiles for the GPU, so no CUDA toolkit is needed. The
// relay's data path launches one kernel, [Lists], for lists of many copies: a kernel waits for other
// processes' time slices.
//
//	k, err := kernels.Load(driver)  // in the current context, once
//	page, err := k.NewPage()        // pinned host memory: a flag and findings
//	err = k.Fill(stream, p, size, kernels.Pattern{Seed: 7})
//	err = k.Compare(stream, p, size, kernels.Pattern{Seed: 7}, page)
//	// ... the stream's work is done ...
//	difference := page.Difference()
//
// A running [Kernels.Read], [Kernels.Spin] or [Kernels.Stream] blocks calls that wait for the whole
// context: create memory, pages and streams before the launch, and free them afterwards.
package kernels

import (
	_ "embed"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/peerlane/peerlane/cuda"
)

//go:embed kernels.ptx
var ptx string

// word is the unit of addresses and sizes here: 8 bytes.
const word = 8

// Kernels are the kernels loaded in one context, which must be current for every method. The
// kernels operate on device memory.
type Kernels struct {
	driver                              *cuda.Driver
	module                              cuda.Module
	fill, compare, reader, spin, stream cuda.Function
	launches                            atomic.Uint64
	multiprocessors, threads            int // of the device: number of SMs, and threads per SM
}

// Load compiles the kernels for the device of the current context, and loads them immediately even
// under lazy loading. If the driver rejects the PTX, the error includes the compiler's log.
func Load(d *cuda.Driver, device cuda.Device) (*Kernels, error) {
	k := &Kernels{driver: d}
	var err error
	if k.multiprocessors, err = d.DeviceAttribute(device, cuda.AttributeMultiprocessors); err != nil {
		return nil, err
	}
	if k.threads, err = d.DeviceAttribute(device, cuda.AttributeThreadsPerMultiprocessor); err != nil {
		return nil, err
	}
	if k.module, err = d.ModuleLoadPTX(ptx); err != nil {
		return nil, fmt.Errorf("kernels of Peerlane: %w", err)
	}
	for name, f := range map[string]*cuda.Function{
		"peerlane_fill": &k.fill, "peerlane_compare": &k.compare, "peerlane_reader": &k.reader,
		"peerlane_spin": &k.spin, "peerlane_stream": &k.stream,
	} {
		if *f, err = d.ModuleGetFunction(k.module, name); err != nil {
			return nil, errors.Join(err, k.Unload())
		}
	}
	return k, nil
}

// Unload unloads the kernels, of which none may be running.
func (k *Kernels) Unload() error { return k.driver.ModuleUnload(k.module) }

// Page is pinned host memory shared by a kernel and the host: a flag that the host sets, and the
// kernel's results. Only one launch at a time may use a page.
type Page struct {
	driver *cuda.Driver
	words  []uint64
	device cuda.Ptr
}

const (
	maxBlocks = 1024
	findings  = 8 // first word of the results, behind the flag's cache line
	pageWords = findings + 2*maxBlocks
)

// NewPage makes a page whose flag is 0.
func (k *Kernels) NewPage() (*Page, error) {
	p, err := k.driver.MemHostAlloc(pageWords * word)
	if err != nil {
		return nil, err
	}
	device, err := k.driver.MemHostDevicePtr(p)
	if err != nil {
		return nil, errors.Join(err, k.driver.MemHostFree(p))
	}
	page := &Page{k.driver, unsafe.Slice((*uint64)(p), pageWords), device}
	clear(page.words)
	return page, nil
}

// Free frees the page, which no running kernel may use.
func (p *Page) Free() error { return p.driver.MemHostFree(unsafe.Pointer(&p.words[0])) }

// SetFlag sets the page's flag. Running kernels see the new value.
func (p *Page) SetFlag(v uint64) { atomic.StoreUint64(&p.words[0], v) }

// Flag returns the device address of the flag, 8 bytes. Streams can write values to the address
// too.
func (p *Page) Flag() cuda.Ptr { return p.device }

func (p *Page) found(i int) uint64 { return atomic.LoadUint64(&p.words[findings+i]) }

// begin clears the results and returns their device address.
func (p *Page) begin() uint64 {
	for i := findings; i < pageWords; i++ {
		atomic.StoreUint64(&p.words[i], 0)
	}
	return uint64(p.device) + findings*word
}

// Difference counts the words that differ from the pattern.
type Difference struct {
	Words uint64 // of 8 bytes, that differ
	First uint64 // offset of the first differing word in bytes, if Words is not 0
}

func (d Difference) String() string {
	if d.Words == 0 {
		return "no difference"
	}
	return fmt.Sprintf("%d words differ, the first at offset %d", d.Words, d.First)
}

// Difference returns the result of a completed [Kernels.Compare].
func (p *Page) Difference() Difference {
	var d Difference
	for block := range maxBlocks {
		n, first := p.found(2*block), p.found(2*block+1)*word
		if n > 0 && (d.Words == 0 || first < d.First) {
			d.First = first
		}
		d.Words += n
	}
	return d
}

// Rounds returns the number of passes of a completed [Kernels.Spin] or [Kernels.Stream], summed
// over blocks.
func (p *Page) Rounds() uint64 {
	var n uint64
	for block := range maxBlocks {
		n += p.found(block)
	}
	return n
}

// Fill writes a pattern to size bytes of device memory, an address and a size
// that are multiples of 8.
func (k *Kernels) Fill(s cuda.Stream, p cuda.Ptr, size uint64, pattern Pattern) error {
	if err := whole(p, size, word); err != nil {
		return err
	}
	return k.driver.Launch(k.fill, k.blocks(size/word), blockSize, s, uint64(p), size/word, pattern.Seed, pattern.First)
}

// Compare compares size bytes of device memory with a pattern; address and
// size are multiples of 8. When the stream's work is done [Page.Difference]
// has the result.
func (k *Kernels) Compare(s cuda.Stream, p cuda.Ptr, size uint64, pattern Pattern, result *Page) error {
	if err := whole(p, size, word); err != nil {
		return err
	}
	return k.driver.Launch(k.compare, k.blocks(size/word), blockSize, s,
		uint64(p), size/word, pattern.Seed, pattern.First, result.begin())
}

// Reading describes the work of a reader, a kernel of one block that runs while data arrives. In
// each round the reader waits for the page's flag, and then compares.
type Reading struct {
	// Value is the minimum of the flag in the first round, in the cyclic order of
	// StreamWaitValue64. The minimum rises by 1 per round.
	Value uint64
	// Polls is the maximum number of polls of the flag per round, at about a million per second; 0
	// is 10 million. The reader gives up after the last poll.
	Polls   uint64
	Rounds  uint64 // 0 is 1
	Address cuda.Ptr
	Size    uint64 // bytes, a multiple of 8 as the address is
	// Seed is the seed of the pattern in the first round, from word 0. The seed rises by 1 per
	// round.
	Seed uint64
}

// Read starts a reader, which uses the page until the stream's work is complete.
func (k *Kernels) Read(s cuda.Stream, r Reading, page *Page) error {
	if err := whole(r.Address, r.Size, word); err != nil {
		return err
	}
	if r.Polls == 0 {
		r.Polls = 10_000_000
	}
	if r.Rounds == 0 {
		r.Rounds = 1
	}
	return k.driver.Launch(k.reader, 1, readerSize, s, uint64(page.Flag()), r.Value, r.Polls, r.Rounds,
		uint64(r.Address), r.Size/word, r.Seed, page.begin())
}

// Progress is the progress of a reader, also while the kernel runs.
type Progress struct {
	Running bool   // the kernel has started
	Rounds  uint64 // compared rounds
	Ended   bool
	GaveUp  bool // the flag did not change in time
	// Difference is the sum over the compared rounds. Round is the first round with a difference,
	// from 0; First refers to Round.
	Difference
	Round uint64
}

// Progress returns the progress of the reader that was started with the page.
func (p *Page) Progress() Progress {
	begun, ended := p.found(0), p.found(1)
	g := Progress{Running: begun > 0, Ended: ended != 0, GaveUp: ended == 2}
	if begun > 0 {
		g.Rounds = begun - 1
	}
	if n := p.found(2); n > 0 {
		g.Difference, g.Round = Difference{n, p.found(3) * word}, p.found(4)
	}
	return g
}

// Spin keeps every SM busy without memory traffic, for the duration d from the start of the kernel,
// or until the page's flag is not 0.
func (k *Kernels) Spin(s cuda.Stream, d time.Duration, page *Page) error {
	return k.driver.Launch(k.spin, k.everywhere(), blockSize, s, uint64(page.Flag()), uint64(d.Nanoseconds()),
		page.begin(), k.launch())
}

// launch returns a number that is unique among launches of the module.
func (k *Kernels) launch() uint64 { return k.launches.Add(1) }

// Stream keeps the memory busy: the kernel repeatedly reads and writes size bytes, address and size
// multiples of 16, for the duration d from its start, or until the page's flag is not 0. A started
// pass is completed. The kernel moves 2 × size × [Page.Rounds] / [Kernels.Blocks] bytes.
func (k *Kernels) Stream(s cuda.Stream, p cuda.Ptr, size uint64, d time.Duration, page *Page) error {
	if err := whole(p, size, 2*word); err != nil {
		return err
	}
	return k.driver.Launch(k.stream, k.everywhere(), blockSize, s, uint64(p), size/(2*word),
		uint64(page.Flag()), uint64(d.Nanoseconds()), page.begin(), k.launch())
}

// Blocks returns the number of blocks of [Kernels.Spin] and [Kernels.Stream].
func (k *Kernels) Blocks() int { return int(k.everywhere()) }

const (
	blockSize  = 512  // threads
	readerSize = 1024 // threads of the reader's single block
)

// blocks returns the number of blocks that share n words.
func (k *Kernels) blocks(n uint64) uint32 {
	return uint32(min(maxBlocks, max(1, (n+blockSize-1)/blockSize)))
}

// everywhere returns the number of blocks that the device's SMs hold at once.
func (k *Kernels) everywhere() uint32 {
	return uint32(min(maxBlocks, k.multiprocessors*max(1, k.threads/blockSize)))
}

func whole(p cuda.Ptr, size, unit uint64) error {
	if uint64(p)%unit != 0 || size%unit != 0 {
		return fmt.Errorf("kernel on %d bytes at %s: address and size must be multiples of %d", size, p, unit)
	}
	return nil
}
