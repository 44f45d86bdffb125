package vm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/peerlane/peerlane/integration/pinned"
)

// Image is a bootable image.
type Image struct {
	kind   string
	Kernel string // vmlinux
	Disk   string // ext4, read-only: machines write to a private copy
	// boot has the modules that the initial RAM file system loads, and the file "order" with their
	// names.
	boot string
}

// Builder builds and caches images.
type Builder struct {
	// dir is the cache; empty for peerlane/vm in the user's cache directory.
	dir string
	// Progress is called for each step.
	Progress func(format string, arguments ...any)
}

// Image returns an image of a kind, which it builds unless the cache has an image of the current
// recipe. It needs root: a root file system has files of many users.
func (b *Builder) Image(ctx context.Context, kind string) (*Image, error) {
	if packages[kind] == nil {
		return nil, fmt.Errorf("unknown image %q; use %s or %s", kind, Small, Full)
	}
	if os.Geteuid() != 0 {
		return nil, errors.New(
			"the image of a virtual machine needs root to build: its root file system has files of many users")
	}
	image, err := b.image(ctx, kind)
	if err != nil {
		return nil, fmt.Errorf("create the %s image: %w", kind, err)
	}
	return image, nil
}

func (b *Builder) image(ctx context.Context, kind string) (*Image, error) {
	if b.Progress == nil {
		b.Progress = func(string, ...any) {}
	}
	if b.dir == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return nil, err
		}
		b.dir = filepath.Join(cache, "peerlane", "vm")
	}
	if err := os.MkdirAll(b.dir, 0o755); err != nil {
		return nil, err
	}
	of, err := findKernel()
	if err != nil {
		return nil, err
	}
	key, err := of.key()
	if err != nil {
		return nil, err
	}
	kernelDir := filepath.Join(b.dir, "kernel-"+key)
	diskDir := filepath.Join(b.dir, kind+"-"+rootKey(kind, key))
	if !exists(kernelDir) || !exists(diskDir) {
		if err := b.makeBoth(ctx, kind, of, kernelDir, diskDir); err != nil {
			return nil, err
		}
	}
	now := time.Now()
	for _, used := range []string{kernelDir, diskDir} {
		if err := os.Chtimes(used, now, now); err != nil {
			return nil, err
		}
	}
	return &Image{
		kind: kind, Kernel: filepath.Join(kernelDir, "vmlinux"), boot: filepath.Join(kernelDir, "boot"),
		Disk: filepath.Join(diskDir, "root.ext4"),
	}, nil
}

// makeBoth builds a missing kernel and a missing disk with the kernel's modules. A lock serialises
// processes.
func (b *Builder) makeBoth(ctx context.Context, kind string, of kernel, kernelDir, diskDir string) error {
	cache := pinned.Cache{Dir: b.dir, Progress: b.Progress}
	unlock, err := cache.Open(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	// The root file system's packages do not need the kernel, which takes as long.
	group, together := errgroup.WithContext(ctx)
	tree := filepath.Join(b.dir, "tree-"+kind)
	group.Go(func() error {
		return cache.Once(filepath.Base(kernelDir), func(dir string) error { return b.makeKernel(together, dir, of) })
	})
	missing := !exists(diskDir)
	if missing {
		group.Go(func() error { return b.makeTree(together, tree, kind) })
	}
	if err := group.Wait(); err != nil || !missing {
		return err
	}
	if err := cache.Once(filepath.Base(diskDir),
		func(dir string) error { return b.makeDisk(ctx, dir, tree, kernelDir, kind) }); err != nil {
		return err
	}
	return os.RemoveAll(tree)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// makeKernel downloads Debian's kernel and builds our modules for it.
func (b *Builder) makeKernel(ctx context.Context, dir string, of kernel) error {
	version := of.release
	b.Progress("kernel %s: modules", version)
	source := filepath.Join(dir, "source")
	if err := os.CopyFS(source, moduleSource); err != nil {
		return err
	}
	built := filepath.Join(dir, "built")
	if _, err := step(ctx, dir, "sh", filepath.Join(source, "module", "build"), version, of.tarball,
		"/usr/src/linux-headers-"+version, built); err != nil {
		return err
	}
	b.Progress("kernel %s: image", version)
	// The package is only unpacked: this host boots another kernel.
	if _, err := step(ctx, dir, "apt-get", "download", "-o", "APT::Sandbox::User=root",
		"linux-image-"+version+"="+of.version); err != nil {
		return err
	}
	debs, err := filepath.Glob(filepath.Join(dir, "linux-image-*.deb"))
	if err != nil || len(debs) != 1 {
		return fmt.Errorf("apt-get downloaded %d packages of linux-image-%s: %v", len(debs), version, err)
	}
	unpacked := filepath.Join(dir, "unpacked")
	if _, err := step(ctx, dir, "dpkg", "-x", debs[0], unpacked); err != nil {
		return err
	}
	// Uncompressed, the kernel boots two seconds faster.
	if err := output(ctx, filepath.Join(dir, "vmlinux"), "sh", filepath.Join(built, "extract-vmlinux"),
		filepath.Join(unpacked, "boot", "vmlinuz-"+version)); err != nil {
		return err
	}
	return b.collectModules(ctx, dir, unpacked, built, version)
}

// collectModules copies the guests' modules, uncompressed, into lib/modules, and the modules for
// the disk into boot.
func (b *Builder) collectModules(ctx context.Context, dir, unpacked, built, version string) error {
	from := filepath.Join(unpacked, "lib", "modules", version)
	ours, err := filepath.Glob(filepath.Join(built, "*.ko"))
	if err != nil {
		return err
	}
	// depmod prefers updates/ to the kernel's own.
	updates := filepath.Join(from, "updates")
	if err := os.MkdirAll(updates, 0o755); err != nil {
		return err
	}
	for _, ko := range ours {
		if err := os.Rename(ko, filepath.Join(updates, filepath.Base(ko))); err != nil {
			return err
		}
	}
	if _, err := step(ctx, dir, "depmod", "-b", unpacked, version); err != nil {
		return err
	}
	into := filepath.Join(dir, "lib", "modules", version)
	boot := filepath.Join(dir, "boot")
	for _, d := range []string{into, boot} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	for _, name := range []string{"modules.builtin", "modules.builtin.modinfo", "modules.order"} {
		if err := copyFile(filepath.Join(from, name), filepath.Join(into, name)); err != nil {
			return err
		}
	}
	var order []string
	for i, name := range append(slices.Clone(bootModules), inherited(Full, modules)...) {
		files, err := dependencies(ctx, unpacked, version, name)
		if err != nil {
			return err
		}
		for _, file := range files {
			plain, err := uncompress(ctx, file, filepath.Join(into, strings.TrimPrefix(filepath.Dir(file), from)))
			if err != nil {
				return err
			}
			base := filepath.Base(plain)
			if i >= len(bootModules) || slices.Contains(order, base) {
				continue
			}
			order = append(order, base)
			if err := os.Link(plain, filepath.Join(boot, base)); err != nil {
				return err
			}
		}
	}
	if err := os.WriteFile(filepath.Join(boot, "order"), []byte(strings.Join(order, "\n")+"\n"), 0o644); err != nil {
		return err
	}
	if _, err := step(ctx, dir, "depmod", "-b", dir, version); err != nil {
		return err
	}
	for _, done := range []string{"source", "built", "unpacked"} {
		if err := os.RemoveAll(filepath.Join(dir, done)); err != nil {
			return err
		}
	}
	debs, err := filepath.Glob(filepath.Join(dir, "*.deb"))
	if err != nil {
		return err
	}
	for _, deb := range debs {
		if err := os.Remove(deb); err != nil {
			return err
		}
	}
	return nil
}

// dependencies returns the files of a module in load order; empty if it is built into the kernel.
func dependencies(ctx context.Context, root, version, name string) ([]string, error) {
	out, err := step(ctx, root, "modprobe", "-d", root, "-S", version, "--show-depends", name)
	if err != nil {
		return nil, err
	}
	var files []string
	for line := range strings.Lines(string(out)) {
		if words := strings.Fields(line); len(words) >= 2 && words[0] == "insmod" {
			files = append(files, words[1])
		}
	}
	return files, nil
}

// uncompress puts a module into a folder: the guest would take long over xz.
func uncompress(ctx context.Context, file, dir string) (string, error) {
	base := strings.TrimSuffix(filepath.Base(file), ".xz")
	plain := filepath.Join(dir, base)
	if exists(plain) {
		return plain, nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	if !strings.HasSuffix(file, ".xz") {
		return plain, copyFile(file, plain)
	}
	return plain, output(ctx, plain, "xz", "-dc", file)
}

func copyFile(from, to string) error {
	text, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, text, info.Mode().Perm())
}

// makeTree makes a root file system in a folder.
func (b *Builder) makeTree(ctx context.Context, tree, kind string) error {
	b.Progress("%s image: packages", kind)
	if err := os.RemoveAll(tree); err != nil {
		return err
	}
	arguments := []string{
		"--quiet", "--variant=minbase", "--format=directory", "--mode=root",
		"--aptopt=APT::Install-Recommends \"false\"",
	}
	for _, unread := range []string{"doc", "man", "locale", "info", "lintian"} {
		arguments = append(arguments, "--dpkgopt=path-exclude=/usr/share/"+unread+"/*")
	}
	for _, hook := range inherited(kind, customize) {
		arguments = append(arguments, "--customize-hook="+hook)
	}
	arguments = append(arguments, "--include="+strings.Join(inherited(kind, packages), ","), suite, tree)
	_, err := step(ctx, b.dir, "mmdebstrap", arguments...)
	return err
}

// makeDisk puts the root file system and the kernel's modules into an ext4.
func (b *Builder) makeDisk(ctx context.Context, dir, tree, kernelDir, kind string) error {
	b.Progress("%s image: disk", kind)
	// On Debian /lib is a symbolic link, which CopyFS does not follow.
	if err := os.CopyFS(filepath.Join(tree, "usr", "lib", "modules"),
		os.DirFS(filepath.Join(kernelDir, "lib", "modules"))); err != nil {
		return err
	}
	_, err := step(ctx, dir, "mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-m", "0",
		"-E", "lazy_itable_init=1", "-d", tree, "root.ext4", fmt.Sprintf("%dM", diskMiB[kind]))
	return err
}
