// SPDX-License-Identifier: GPL-2.0
/*
 * pcitree: PCI root buses whose functions are a table in memory, so that the
 * kernel's own /sys shows GPUs, NICs and switches that are not there. For tests
 * only: nothing answers behind the BARs.
 *
 * One write to /dev/pcitree is a whole table, a struct header and its struct
 * records. It replaces the tree of the write before; a table without functions
 * removes it. integration/vm/pcitree makes tables from text.
 *
 *   EINVAL  the table is not one; the kernel's log says why, the old tree stays
 *   EBUSY   an RDMA device lies below a function of the old tree, which stays
 *   else    the old tree is gone, and the new one could not be made
 *
 * The module cannot be removed while its tree stands.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/kref.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/nodemask.h>
#include <linux/pci.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#define MAGIC		"pcitree1"
#define MAX_FUNCTIONS	512
#define CONFIG_SIZE	4096
#define MAX_WINDOW	(64ULL << 40)

/*
 * Where windows for BARs are looked for: above all memory and all devices that a
 * guest has, so that a table gets the same addresses in each.
 */
#define WINDOWS_START	(32ULL << 40)

struct header {
	char magic[8];
	__le64 window;		/* bytes for the BARs below one root; a power of two */
	__le32 functions;
	char version[236];	/* text of /proc/driver/nvidia/version; "" for none */
} __packed;

struct record {
	__le32 domain;
	__le32 node;		/* NUMA node, -1 for none */
	u8 root;		/* number of the root bus */
	u8 bus;
	u8 devfn;
	u8 reserved;
	char driver[20];	/* one of drivers[]; "" for none */
	char information[992];	/* text of gpus/ADDRESS/information; "" for none */
	u8 config[CONFIG_SIZE];
	u8 writable[CONFIG_SIZE];	/* the bits of config that can be written */
} __packed;

/*
 * A tree lives until the last reference to one of its devices is dropped, which
 * may be after its buses have been removed.
 */
struct tree {
	struct kref references;
	raw_spinlock_t lock;	/* guards config: x86 reads and writes without one */
	struct list_head roots;
	struct proc_dir_entry *proc;
	unsigned int functions;
	const struct header *header;
	struct record *records;
};

/* A root bus, in the private part of its host bridge. */
struct root {
	struct pci_sysdata sysdata;	/* the bus's: first, and found from there */
	struct list_head siblings;
	struct pci_host_bridge *bridge;
	struct tree *tree;
	u8 number;
	struct resource buses;
	struct resource memory;
};

static DEFINE_MUTEX(tree_mutex);	/* one table at a time; guards standing */
static struct tree *standing;

static void tree_free(struct kref *references)
{
	struct tree *tree = container_of(references, struct tree, references);

	kvfree(tree->header);
	kfree(tree);
}

static void tree_put(struct tree *tree)
{
	kref_put(&tree->references, tree_free);
}

/* Configuration space. Callers may hold spinlocks: nothing here sleeps. */

static struct record *record_find(struct pci_bus *bus, unsigned int devfn)
{
	struct root *root = container_of(bus->sysdata, struct root, sysdata);
	struct tree *tree = root->tree;
	unsigned int i;

	for (i = 0; i < tree->functions; i++) {
		struct record *r = &tree->records[i];

		if (r->bus == bus->number && r->devfn == devfn &&
		    r->root == root->number &&
		    le32_to_cpu(r->domain) == root->sysdata.domain)
			return r;
	}
	return NULL;
}

static int config_read(struct pci_bus *bus, unsigned int devfn, int where,
		       int size, u32 *value)
{
	struct root *root = container_of(bus->sysdata, struct root, sysdata);
	struct record *r = record_find(bus, devfn);
	unsigned long flags;
	int i;

	PCI_SET_ERROR_RESPONSE(value);
	if (!r)
		return PCIBIOS_DEVICE_NOT_FOUND;
	if (where < 0 || where + size > CONFIG_SIZE)
		return PCIBIOS_BAD_REGISTER_NUMBER;
	*value = 0;
	raw_spin_lock_irqsave(&root->tree->lock, flags);
	for (i = 0; i < size; i++)
		*value |= (u32)r->config[where + i] << (8 * i);
	raw_spin_unlock_irqrestore(&root->tree->lock, flags);
	return PCIBIOS_SUCCESSFUL;
}

static int config_write(struct pci_bus *bus, unsigned int devfn, int where,
			int size, u32 value)
{
	struct root *root = container_of(bus->sysdata, struct root, sysdata);
	struct record *r = record_find(bus, devfn);
	unsigned long flags;
	int i;

	if (!r)
		return PCIBIOS_DEVICE_NOT_FOUND;
	if (where < 0 || where + size > CONFIG_SIZE)
		return PCIBIOS_BAD_REGISTER_NUMBER;
	raw_spin_lock_irqsave(&root->tree->lock, flags);
	for (i = 0; i < size; i++) {
		u8 mask = r->writable[where + i];

		r->config[where + i] &= ~mask;
		r->config[where + i] |= (value >> (8 * i)) & mask;
	}
	raw_spin_unlock_irqrestore(&root->tree->lock, flags);
	return PCIBIOS_SUCCESSFUL;
}

static struct pci_ops config_ops = {
	.read = config_read,
	.write = config_write,
};

/*
 * Drivers of the names that real ones have. They have no ids: a function of the
 * tree gets its driver by driver_override, and no other function is taken.
 */

static int function_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	return pdev->bus->ops == &config_ops ? 0 : -ENODEV;
}

static struct pci_driver drivers[] = {
	{ .name = "nvidia", .probe = function_probe },
	{ .name = "mlx5_core", .probe = function_probe },
};

/* What no driver is called, for functions that no driver of the guest may touch. */
#define NO_DRIVER "(none)"

static bool driver_known(const char *name)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(drivers); i++)
		if (!strcmp(drivers[i].name, name))
			return true;
	return !*name;
}

/* /proc/driver/nvidia */

static int text_show(struct seq_file *file, void *unused)
{
	seq_puts(file, file->private);
	return 0;
}

static int proc_add(struct tree *tree)
{
	struct proc_dir_entry *gpus;
	unsigned int i;

	if (!tree->header->version[0])
		return 0;
	tree->proc = proc_mkdir("driver/nvidia", NULL);
	if (!tree->proc)
		return -ENOMEM;
	if (!proc_create_single_data("version", 0444, tree->proc, text_show,
				     (void *)tree->header->version))
		return -ENOMEM;
	gpus = proc_mkdir("gpus", tree->proc);
	if (!gpus)
		return -ENOMEM;
	for (i = 0; i < tree->functions; i++) {
		struct record *r = &tree->records[i];
		struct proc_dir_entry *gpu;
		char address[sizeof("0123:01:23.4")];

		if (!r->information[0])
			continue;
		snprintf(address, sizeof(address), "%04x:%02x:%02x.%x",
			 le32_to_cpu(r->domain), r->bus, PCI_SLOT(r->devfn),
			 PCI_FUNC(r->devfn));
		gpu = proc_mkdir(address, gpus);
		if (!gpu || !proc_create_single_data("information", 0444, gpu,
						     text_show, r->information))
			return -ENOMEM;
	}
	return 0;
}

/* The tree's buses. All of it runs under pci_lock_rescan_remove. */

static struct pci_dev *function_get(const struct record *r)
{
	return pci_get_domain_bus_and_slot(le32_to_cpu(r->domain), r->bus, r->devfn);
}

static bool record_is_bridge(const struct record *r)
{
	return (r->config[PCI_HEADER_TYPE] & PCI_HEADER_TYPE_MASK) ==
	       PCI_HEADER_TYPE_BRIDGE;
}

static void root_release(struct pci_host_bridge *bridge)
{
	struct root *root = bridge->release_data;

	tree_put(root->tree);
	module_put(THIS_MODULE);
}

/*
 * function_settle sees that a function came up as the table says, and decides on
 * its driver before drivers see it.
 */
static int function_settle(const struct record *r)
{
	struct pci_dev *pdev = function_get(r);
	int i, err = 0;

	if (!pdev) {
		pr_err("no bridge leads to %04x:%02x:%02x.%x\n",
		       le32_to_cpu(r->domain), r->bus, PCI_SLOT(r->devfn),
		       PCI_FUNC(r->devfn));
		return -ENXIO;
	}
	for (i = 0; i < PCI_STD_NUM_BARS; i++) {
		if (!pdev->resource[i].flags || pdev->resource[i].parent)
			continue;
		pci_err(pdev, "BAR %d has no room below its root\n", i);
		err = -ENOSPC;
	}
	/* Bridges go to the kernel's pcieport. */
	if (!err && !record_is_bridge(r))
		err = device_set_driver_override(&pdev->dev, r->driver[0] ?
						 r->driver : NO_DRIVER);
	pci_dev_put(pdev);
	return err;
}

static int root_add(struct tree *tree, const struct record *first)
{
	resource_size_t window = le64_to_cpu(tree->header->window);
	struct pci_host_bridge *bridge;
	struct root *root;
	unsigned int i;
	int err;

	bridge = pci_alloc_host_bridge(sizeof(*root));
	if (!bridge)
		return -ENOMEM;
	root = pci_host_bridge_priv(bridge);
	root->bridge = bridge;
	root->tree = tree;
	root->number = first->root;
	root->sysdata.domain = le32_to_cpu(first->domain);
	root->sysdata.node = (int)le32_to_cpu(first->node);
	kref_get(&tree->references);
	__module_get(THIS_MODULE);
	pci_set_host_bridge_release(bridge, root_release, root);

	bridge->sysdata = &root->sysdata;
	bridge->ops = &config_ops;
	/* The ports raise no interrupts, without which pcieport serves none of these. */
	bridge->native_aer = 0;
	bridge->native_pcie_hotplug = 0;
	bridge->native_shpc_hotplug = 0;
	bridge->native_pme = 0;
	bridge->native_dpc = 0;

	root->buses = (struct resource)DEFINE_RES_NAMED(first->root, 1, "pcitree",
							IORESOURCE_BUS);
	for (i = 0; i < tree->functions; i++) {
		struct record *r = &tree->records[i];

		if (r->root == first->root && r->domain == first->domain &&
		    r->bus > root->buses.end)
			root->buses.end = r->bus;
	}
	pci_add_resource(&bridge->windows, &root->buses);

	root->memory.name = "pcitree";
	root->memory.flags = IORESOURCE_MEM | IORESOURCE_MEM_64 | IORESOURCE_PREFETCH;
	err = allocate_resource(&iomem_resource, &root->memory, window,
				WINDOWS_START, iomem_resource.end, window,
				NULL, NULL);
	if (err) {
		pr_err("no address space for %llu GiB of BARs above %llu TiB: the guest's CPU needs more physical address bits (QEMU: -cpu max,phys-bits=48)\n",
		       (u64)window >> 30, WINDOWS_START >> 40);
		goto free;
	}
	pci_add_resource(&bridge->windows, &root->memory);

	err = pci_scan_root_bus_bridge(bridge);
	if (err) {
		pr_err("root bus %04x:%02x: error %d\n", root->sysdata.domain,
		       root->number, err);
		release_resource(&root->memory);
		goto free;
	}
	/* From here on, tree_remove takes it away. */
	list_add_tail(&root->siblings, &tree->roots);

	pci_bus_size_bridges(bridge->bus);
	pci_bus_assign_resources(bridge->bus);
	for (i = 0; i < tree->functions; i++) {
		struct record *r = &tree->records[i];

		if (r->root != root->number || r->domain != first->domain)
			continue;
		err = function_settle(r);
		if (err)
			return err;
	}
	pci_bus_add_devices(bridge->bus);
	return 0;

free:
	pci_free_host_bridge(bridge);
	return err;
}

static void tree_remove(struct tree *tree)
{
	struct root *root, *next;

	list_for_each_entry_safe(root, next, &tree->roots, siblings) {
		struct pci_host_bridge *bridge = root->bridge;

		list_del(&root->siblings);
		pci_stop_root_bus(bridge->bus);
		pci_remove_root_bus(bridge->bus);
		release_resource(&root->memory);
		pci_free_host_bridge(bridge);
	}
	if (tree->proc)
		proc_remove(tree->proc);
	tree_put(tree);
}

static int tree_add(struct tree *tree)
{
	unsigned int i;
	int err;

	err = proc_add(tree);
	for (i = 0; !err && i < tree->functions; i++) {
		struct record *r = &tree->records[i];
		struct root *root;
		bool there = false;

		list_for_each_entry(root, &tree->roots, siblings)
			there |= root->number == r->root &&
				 root->sysdata.domain == le32_to_cpu(r->domain);
		if (!there)
			err = root_add(tree, r);
	}
	return err;
}

/* tree_busy: removing the parent of a device that lives would leave it in the air. */
static bool tree_busy(struct tree *tree)
{
	unsigned int i;

	for (i = 0; i < tree->functions; i++) {
		struct record *r = &tree->records[i];
		struct device *child;
		struct pci_dev *pdev;

		/* Children of bridges are the tree's own. */
		if (record_is_bridge(r))
			continue;
		pdev = function_get(r);
		if (!pdev)
			continue;
		child = device_find_any_child(&pdev->dev);
		if (child)
			pci_err(pdev, "%s lies below: remove it first\n",
				dev_name(child));
		put_device(child);
		pci_dev_put(pdev);
		if (child)
			return true;
	}
	return false;
}

/* record_fault says what is wrong with a record; NULL for nothing. */
static const char *record_fault(const struct tree *tree, unsigned int index)
{
	const struct record *r = &tree->records[index];
	int node = (int)le32_to_cpu(r->node);
	const struct pci_bus *bus;
	unsigned int i;

	if (le32_to_cpu(r->domain) > 0xffff)
		return "the domain is above ffff";
	if (r->bus < r->root)
		return "the bus lies before its root";
	if (node != NUMA_NO_NODE &&
	    (node < 0 || node >= MAX_NUMNODES || !node_online(node)))
		return "the guest has no such NUMA node";
	if ((r->config[PCI_HEADER_TYPE] & PCI_HEADER_TYPE_MASK) > PCI_HEADER_TYPE_BRIDGE)
		return "the header is neither of type 0 nor of type 1";
	if (strnlen(r->driver, sizeof(r->driver)) == sizeof(r->driver) ||
	    strnlen(r->information, sizeof(r->information)) == sizeof(r->information))
		return "a text does not end";
	if (!driver_known(r->driver))
		return "the driver is unknown";
	for (i = 0; i < index; i++) {
		const struct record *other = &tree->records[i];

		if (other->domain != r->domain)
			continue;
		if (other->root == r->root && other->node != r->node)
			return "its root is at another NUMA node elsewhere";
		if (other->bus != r->bus)
			continue;
		if (other->root != r->root)
			return "the bus belongs to two roots";
		if (other->devfn == r->devfn)
			return "the address is there twice";
	}
	bus = pci_find_bus(le32_to_cpu(r->domain), r->bus);
	if (bus && bus->ops != &config_ops)
		return "the guest has a bus of that number";
	return NULL;
}

static int tree_check(const struct tree *tree, size_t size)
{
	u64 window = le64_to_cpu(tree->header->window);
	unsigned int i;

	if (memcmp(tree->header->magic, MAGIC, sizeof(tree->header->magic)) ||
	    strnlen(tree->header->version, sizeof(tree->header->version)) ==
		    sizeof(tree->header->version) ||
	    tree->functions > MAX_FUNCTIONS ||
	    size != sizeof(*tree->header) + tree->functions * sizeof(*tree->records)) {
		pr_err("%zu bytes are no table of up to %d functions\n", size,
		       MAX_FUNCTIONS);
		return -EINVAL;
	}
	if (tree->functions && (!is_power_of_2(window) || window < SZ_1M ||
				window > MAX_WINDOW)) {
		pr_err("a window of %llu bytes for BARs is none\n", window);
		return -EINVAL;
	}
	for (i = 0; i < tree->functions; i++) {
		const struct record *r = &tree->records[i];
		const char *fault = record_fault(tree, i);

		if (!fault)
			continue;
		pr_err("record %u (%04x:%02x:%02x.%x): %s\n", i,
		       le32_to_cpu(r->domain), r->bus, PCI_SLOT(r->devfn),
		       PCI_FUNC(r->devfn), fault);
		return -EINVAL;
	}
	return 0;
}

/* tree_new copies a table in; tree_check is still to come. */
static struct tree *tree_new(const char __user *from, size_t size)
{
	struct tree *tree;
	void *table;

	if (size < sizeof(struct header) ||
	    size > sizeof(struct header) + MAX_FUNCTIONS * sizeof(struct record)) {
		pr_err("%zu bytes are no table of up to %d functions\n", size,
		       MAX_FUNCTIONS);
		return ERR_PTR(-EINVAL);
	}
	tree = kzalloc(sizeof(*tree), GFP_KERNEL);
	if (!tree)
		return ERR_PTR(-ENOMEM);
	table = vmemdup_user(from, size);
	if (IS_ERR(table)) {
		kfree(tree);
		return ERR_CAST(table);
	}
	kref_init(&tree->references);
	raw_spin_lock_init(&tree->lock);
	INIT_LIST_HEAD(&tree->roots);
	tree->header = table;
	tree->records = table + sizeof(struct header);
	tree->functions = le32_to_cpu(tree->header->functions);
	return tree;
}

static ssize_t table_write(struct file *file, const char __user *from,
			   size_t size, loff_t *offset)
{
	struct tree *tree = tree_new(from, size);
	int err;

	if (IS_ERR(tree))
		return PTR_ERR(tree);
	mutex_lock(&tree_mutex);
	pci_lock_rescan_remove();
	err = tree_check(tree, size);
	if (!err && standing && tree_busy(standing))
		err = -EBUSY;
	if (err) {
		tree_put(tree);
		goto unlock;
	}
	if (standing)
		tree_remove(standing);
	standing = NULL;
	err = tree_add(tree);
	if (err || !tree->functions)
		tree_remove(tree);
	else
		standing = tree;
unlock:
	pci_unlock_rescan_remove();
	mutex_unlock(&tree_mutex);
	return err ?: size;
}

static const struct file_operations table_operations = {
	.owner = THIS_MODULE,
	.write = table_write,
};

static struct miscdevice table_device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "pcitree",
	.fops = &table_operations,
	.mode = 0600,
};

static int __init pcitree_init(void)
{
	int i, err;

	for (i = 0; i < ARRAY_SIZE(drivers); i++) {
		err = pci_register_driver(&drivers[i]);
		if (err) {
			pr_err("driver %s: error %d; is the real one loaded?\n",
			       drivers[i].name, err);
			goto unregister;
		}
	}
	err = misc_register(&table_device);
	if (err)
		goto unregister;
	return 0;

unregister:
	while (--i >= 0)
		pci_unregister_driver(&drivers[i]);
	return err;
}

/* No tree stands here: each root bus holds the module. */
static void __exit pcitree_exit(void)
{
	int i;

	misc_deregister(&table_device);
	for (i = 0; i < ARRAY_SIZE(drivers); i++)
		pci_unregister_driver(&drivers[i]);
}

module_init(pcitree_init);
module_exit(pcitree_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("PCI trees from a table, for tests only");
