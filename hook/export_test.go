package hook

// HoldersOf is Holders for nodes of other names.
var HoldersOf = holders

// ContainerOfCgroup is what tells of containers that have no relay.
var ContainerOfCgroup = containerOfCgroup
