//! The kernel's RDMA devices, as sysfs and the library describe them.

use std::net::Ipv6Addr;

use serde::Serialize;
use tensorwire_verbs_reactor::{
    Context, DeviceLimits, Library as Verbs, Paging as VerbsPaging, Port as VerbsPort,
};

use super::{Node, Tree};

const DEVICES: &str = "/sys/class/infiniband";
const NODES: &str = "/sys/class/infiniband_verbs";

/// A device. An absent field is not known.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Device {
    /// Its name in the kernel and the library.
    pub(crate) name: String,
    /// The kernel's driver.
    pub(crate) driver: Option<String>,
    /// Whether it is implemented in software over a network interface.
    pub(crate) software: bool,
    /// The vendor's number among PCI devices, in hexadecimal.
    pub(crate) vendor: Option<String>,
    /// The model, in the driver's words.
    pub(crate) model: Option<String>,
    /// The firmware's version.
    pub(crate) firmware: Option<String>,
    /// Its address on the PCI bus.
    pub(crate) pci: Option<String>,
    /// The nearest NUMA node.
    pub(crate) numa_node: Option<u32>,
    /// The file through which programs use it.
    pub(crate) node: Option<Node>,
    /// Its limits, if the library could open it.
    pub(crate) limits: Option<Limits>,
    /// Its paging on demand, if the library could open it.
    pub(crate) on_demand_paging: Option<Paging>,
    /// Whether the library registers memory of other devices by a descriptor (dma-buf), if it could open this device.
    pub(crate) dma_buf: Option<bool>,
    /// Why the library could not open it.
    pub(crate) refused: Option<String>,
    /// Its ports.
    pub(crate) ports: Vec<Port>,
}

/// The limits of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Limits {
    /// Queue pairs.
    pub(crate) queue_pairs: u32,
    /// Work requests outstanding in one direction of a queue pair.
    pub(crate) work_requests: u32,
    /// Ranges of memory in a work request.
    pub(crate) segments: u32,
    /// Ranges of memory that a read is scattered to.
    pub(crate) read_segments: u32,
    /// Completion queues.
    pub(crate) completion_queues: u32,
    /// Completions in one of them.
    pub(crate) completions: u32,
    /// Registered regions.
    pub(crate) regions: u32,
    /// Bytes in one of them.
    pub(crate) region_bytes: u64,
}

/// The operations of reliable connections that a device supports on memory that is not pinned.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Paging {
    /// It sends from such memory.
    pub(crate) send: bool,
    /// It writes from such memory, and executes peers' writes into it.
    pub(crate) write: bool,
    /// It reads into such memory, and lets peers read it.
    pub(crate) read: bool,
    /// Whether users' memory is registered without being pinned.
    pub(crate) used: bool,
}

impl Paging {
    /// The operations, in words.
    pub(crate) fn parts(self) -> String {
        let parts = [(self.send, "sends"), (self.write, "writes"), (self.read, "reads")];
        let parts: Vec<&str> = parts.into_iter().filter(|(has, _)| *has).map(|(_, part)| part).collect();
        if parts.is_empty() { "none".to_owned() } else { parts.join(", ") }
    }
}

impl From<VerbsPaging> for Paging {
    fn from(paging: VerbsPaging) -> Self {
        let VerbsPaging { send, write, read, .. } = paging;
        Self { send, write, read, used: paging.suffices() }
    }
}

/// A port.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Port {
    /// Counted from 1.
    pub(crate) number: u8,
    /// `ACTIVE`, `DOWN`, `INIT` or `ARMED`.
    pub(crate) state: String,
    /// `LinkUp`, `Disabled`, `Polling` and others.
    pub(crate) physical_state: Option<String>,
    /// `Ethernet` or `InfiniBand`.
    pub(crate) link_layer: String,
    /// Speed and width, in the kernel's words.
    pub(crate) rate: Option<String>,
    /// The local identifier in an InfiniBand subnet.
    pub(crate) lid: Option<u16>,
    /// Bytes of the largest packet in use.
    pub(crate) mtu: Option<u32>,
    /// Bytes of the largest packet that can be set.
    pub(crate) mtu_max: Option<u32>,
    /// Bytes of the longest message.
    pub(crate) message_bytes: Option<u32>,
    /// The network interface that it shares its link with.
    pub(crate) interface: Option<Interface>,
    /// Its addresses.
    pub(crate) addresses: Vec<Address>,
}

/// A network interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Interface {
    /// Its name.
    pub(crate) name: String,
    /// Whether it is switched on.
    pub(crate) up: Option<bool>,
    /// Bytes of its largest packet.
    pub(crate) mtu: Option<u32>,
}

/// The kind of packets that use an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) enum AddressKind {
    /// InfiniBand packets.
    #[serde(rename = "infiniband")]
    InfiniBand,
    /// RoCE v1: an Ethernet type of its own, not routable.
    #[serde(rename = "roce-v1")]
    RoceV1,
    /// RoCE v2: UDP over IP.
    #[serde(rename = "roce-v2")]
    RoceV2,
}

impl AddressKind {
    /// Its name in text.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::InfiniBand => "InfiniBand",
            Self::RoceV1 => "RoCE v1",
            Self::RoceV2 => "RoCE v2",
        }
    }
}

/// An entry of a port's address table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Address {
    /// Its index in the table.
    pub(crate) index: u32,
    /// The address, an IPv4 address in its own notation.
    pub(crate) gid: String,
    /// The kind of its packets.
    pub(crate) kind: AddressKind,
}

impl Address {
    /// Whether it is link-local.
    pub(crate) fn is_link_local(&self) -> bool {
        self.gid.parse::<Ipv6Addr>().is_ok_and(|address| address.is_unicast_link_local())
    }
}

impl Port {
    /// Whether it carries traffic.
    pub(crate) fn is_active(&self) -> bool {
        self.state == "ACTIVE"
    }

    /// Whether its link is Ethernet.
    pub(crate) fn is_ethernet(&self) -> bool {
        self.link_layer == "Ethernet"
    }
}

/// All devices of the machine.
pub(super) fn read_all(tree: &Tree) -> Vec<Device> {
    tree.names(DEVICES).into_iter().map(|name| read(tree, name)).collect()
}

fn read(tree: &Tree, name: String) -> Device {
    let at = |file: &str| format!("{DEVICES}/{name}/{file}");
    // Soft-RoCE names the interface it runs over; its `device`, if it has one, belongs to that interface.
    let parent = tree.text(&at("parent"));
    let software = parent.is_some() || !tree.has(&at("device"));
    let driver = match &parent {
        Some(_) => Some("rdma_rxe".to_owned()),
        None => tree.link_name(&at("device/driver")),
    };
    let bus = tree.link_name(&at("device")).filter(|_| !software);
    let ports = tree.names(&at("ports"));
    Device {
        driver,
        software,
        vendor: tree.text(&at("device/vendor")).filter(|_| !software),
        model: tree.text(&at("hca_type")).or_else(|| tree.text(&at("board_id"))),
        firmware: tree.text(&at("fw_ver")),
        pci: bus.filter(|address| address.contains(':')),
        numa_node: tree.number(&at("device/numa_node")), // -1 is not known
        node: node(tree, &name),
        ports: ports
            .iter()
            .filter_map(|number| port(tree, &at("ports"), number, parent.as_deref()))
            .collect(),
        limits: None,
        on_demand_paging: None,
        dma_buf: None,
        refused: None,
        name,
    }
}

fn node(tree: &Tree, device: &str) -> Option<Node> {
    let of_device = |name: &String| tree.text(&format!("{NODES}/{name}/ibdev")).as_deref() == Some(device);
    let name = tree.names(NODES).into_iter().find(of_device)?;
    Some(Node::read(tree, format!("/dev/infiniband/{name}")))
}

fn port(tree: &Tree, ports: &str, number: &str, parent: Option<&str>) -> Option<Port> {
    let at = |file: &str| format!("{ports}/{number}/{file}");
    let word = |file: &str| tree.text(&at(file)).map(|text| after_number(&text));
    let link_layer = tree.text(&at("link_layer")).unwrap_or_default();
    let (addresses, interfaces) = addresses(tree, &at(""), link_layer == "Ethernet");
    let interface = parent.map(str::to_owned).or_else(|| interfaces.into_iter().next());
    Some(Port {
        number: number.parse().ok()?,
        state: word("state").unwrap_or_default(),
        physical_state: word("phys_state"),
        rate: tree.text(&at("rate")),
        lid: hexadecimal(tree, &at("lid")).filter(|_| link_layer != "Ethernet"),
        interface: interface.map(|name| interface_named(tree, name)),
        addresses,
        link_layer,
        ..Port::default()
    })
}

/// `ACTIVE` of `4: ACTIVE`.
fn after_number(text: &str) -> String {
    text.split_once(": ").map_or(text, |(_, word)| word).to_owned()
}

/// The addresses of a port, and the interfaces they belong to.
fn addresses(tree: &Tree, port: &str, ethernet: bool) -> (Vec<Address>, Vec<String>) {
    let mut interfaces = Vec::new();
    let mut addresses = Vec::new();
    for name in tree.names(&format!("{port}gids")) {
        let gid = tree.text(&format!("{port}gids/{name}")).and_then(|text| text.parse::<Ipv6Addr>().ok());
        let (Ok(index), Some(gid)) = (name.parse(), gid) else { continue };
        if gid.is_unspecified() {
            continue;
        }
        let kind = tree.text(&format!("{port}gid_attrs/types/{name}"));
        let kind = match (ethernet, kind.as_deref()) {
            (false, _) => AddressKind::InfiniBand,
            (true, Some("RoCE v2")) => AddressKind::RoceV2,
            (true, _) => AddressKind::RoceV1,
        };
        interfaces.extend(tree.text(&format!("{port}gid_attrs/ndevs/{name}")));
        let gid = gid.to_ipv4_mapped().map_or_else(|| gid.to_string(), |address| address.to_string());
        addresses.push(Address { index, gid, kind });
    }
    (addresses, interfaces)
}

fn interface_named(tree: &Tree, name: String) -> Interface {
    let at = |file: &str| format!("/sys/class/net/{name}/{file}");
    let flags =
        tree.text(&at("flags")).and_then(|text| u32::from_str_radix(text.strip_prefix("0x")?, 16).ok());
    Interface {
        up: flags.map(|flags| flags & 1 == 1), // IFF_UP
        mtu: tree.number(&at("mtu")),
        name,
    }
}

/// A file that holds a number such as `0x1003`.
fn hexadecimal<N: TryFrom<u32>>(tree: &Tree, path: &str) -> Option<N> {
    let text = tree.text(path)?;
    u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()?.try_into().ok()
}

impl Device {
    /// Adds the fields that only the library knows.
    pub(super) fn ask_library(&mut self) {
        // A missing library is reported once, not for every device.
        let Ok(library) = Verbs::open() else { return };
        let asked = Context::open(library, &self.name).and_then(|context| {
            let ports: Vec<_> = self.ports.iter().map(|port| context.port(port.number)).collect();
            let paging = context.paging();
            Ok((context.limits()?, paging, context.takes_dma_buf(), ports))
        });
        match asked {
            Ok((limits, paging, dma_buf, ports)) => {
                self.limits = Some(limits.into());
                self.on_demand_paging = Some(paging.into());
                self.dma_buf = Some(dma_buf);
                for (port, answer) in self.ports.iter_mut().zip(ports) {
                    if let Ok(answer) = answer {
                        port.add(&answer);
                    }
                }
            }
            Err(error) => self.refused = Some(error.to_string()),
        }
    }
}

impl Port {
    fn add(&mut self, answer: &VerbsPort) {
        self.mtu = packet_bytes(answer.mtu);
        self.mtu_max = packet_bytes(answer.mtu_max);
        self.message_bytes = Some(answer.message_bytes);
    }
}

/// The bytes of an `enum ibv_mtu`.
fn packet_bytes(code: u32) -> Option<u32> {
    (1..=5).contains(&code).then(|| 128 << code)
}

impl From<DeviceLimits> for Limits {
    fn from(limits: DeviceLimits) -> Self {
        Self {
            queue_pairs: limits.queue_pairs,
            work_requests: limits.work_requests,
            segments: limits.segments,
            read_segments: limits.read_segments,
            completion_queues: limits.completion_queues,
            completions: limits.completions,
            regions: limits.regions,
            region_bytes: limits.region_bytes,
        }
    }
}
