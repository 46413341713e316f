//! [`Machine`]: what a simulated driver finds when it starts.

use std::collections::BTreeMap;

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::*;

use crate::latency::Latency;
use crate::policy::Preset;

/// How much the sizes and addresses of such memory must be multiples of: a function of the whole property struct. It is
/// asked in the middle of calls, so it makes none.
pub type Granularity = fn(&CUmemAllocationProp, CUmemAllocationGranularity_flags) -> usize;

/// A machine: devices, host nodes, limits, and the driver's version and habits. Plain options; the default is
/// [`Machine::h200`].
///
/// ```
/// use cuvmm_sim::{Machine, Preset, Simulator};
///
/// let machine = Machine::h200_pair().preset(Preset::Measured).driver_version(12020);
/// assert_eq!(Simulator::new(machine).driver()?.device_count(), 2);
/// # Ok::<(), cuvmm_driver::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Machine {
    /// The devices, by ordinal.
    pub devices: Vec<DeviceModel>,
    /// The granularity of each kind of memory.
    pub granularity: Granularity,
    /// What sizes of reservations must be multiples of, and the least that their addresses are aligned to.
    pub reservation_unit: usize,
    /// The host's NUMA nodes; none for a host without NUMA, whose memory is then node 0.
    pub numa_nodes: Vec<NumaNode>,
    /// Whether there is an IMEX channel, without which fabric handles are not permitted.
    pub imex: bool,
    /// The driver's version: it hides later entry points and attributes.
    pub driver_version: CudaVersion,
    /// Which choices the driver makes where the documentation leaves one.
    pub preset: Preset,
    /// What becomes of a hinted reservation.
    pub hints: Hints,
    /// What granting access to memory that RDMA may reach fails with, as under WSL, whatever the attribute says; none
    /// for nothing.
    pub rdma_grants: Option<CUresult>,
    /// Whether memory is compressible that was asked to be: where not, it is made all the same. What RDMA may reach never
    /// is.
    pub compresses: bool,
    /// The most bytes that may be reserved at once; none for as much as the process can have.
    pub address_window: Option<u64>,
    /// The most open files that sharing memory may take in this process; none for as many as the process can have.
    pub open_files: Option<usize>,
    /// What every byte of fresh device memory reads as; none for zero.
    pub poison: Option<u8>,
    /// How long calls take; none for no longer than they need.
    pub latency: Option<Latency>,
    /// Whether nothing that is queued runs until somebody steps it or waits for it.
    pub manual_streams: bool,
}

/// A device of a [`Machine`].
///
/// ```
/// use cuvmm_sim::{DeviceModel, Machine, Simulator};
///
/// let mut machine = Machine::default();
/// let little = DeviceModel { name: "a little one".into(), total_memory: 1 << 30, ..DeviceModel::h200(7) };
/// machine.devices.push(little);
/// let driver = Simulator::new(machine).driver()?;
/// assert_eq!(driver.device(1)?.total_memory()?, 1 << 30);
/// # Ok::<(), cuvmm_driver::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct DeviceModel {
    /// Its name.
    pub name: String,
    /// Its identity, the same in every process that has it in its machine.
    pub uuid: CUuuid,
    /// Its memory, in bytes.
    pub total_memory: usize,
    /// Its attributes by number. What is not listed reads 0 if the driver's version knows it.
    pub attributes: BTreeMap<u32, i32>,
    /// The devices whose memory it reaches, besides its own.
    pub peers: Vec<CUuuid>,
}

/// A NUMA node of the host.
///
/// ```
/// use cuvmm_driver::CUresult;
/// use cuvmm_driver::sys::*;
/// use cuvmm_sim::{Machine, NumaNode, Simulator};
///
/// let nodes = [NumaNode { id: 0, memory: 1 << 30 }, NumaNode { id: 1, memory: 0 }];
/// let driver = Simulator::new(Machine::h200().numa_nodes(nodes)).driver()?;
/// let of_node = |id| CUmemAllocationProp::pinned(CUmemLocation::host_numa(id), CUmemAllocationHandleType::NONE);
/// assert!(driver.mem_create(2 << 20, &of_node(0)).is_ok());
/// let error = driver.mem_create(2 << 20, &of_node(1)).unwrap_err();
/// assert_eq!(error.code(), Some(CUresult::OUT_OF_MEMORY));
/// # Ok::<(), cuvmm_driver::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NumaNode {
    /// Its number.
    pub id: i32,
    /// Its memory, in bytes: 0 for a node without any.
    pub memory: usize,
}

/// What becomes of a reservation with a valid hint.
///
/// ```
/// use cuvmm_driver::sys::CUdeviceptr;
/// use cuvmm_sim::{Hints, Machine, Simulator};
///
/// let driver = Simulator::new(Machine::h200().hints(Hints::Elsewhere)).driver()?;
/// let first = driver.mem_address_reserve(64 << 20, 0, CUdeviceptr(0))?;
/// let behind = CUdeviceptr(first.0 + (64 << 20));
/// assert_ne!(driver.mem_address_reserve(64 << 20, 0, behind)?, behind, "so a buffer that grows there moves");
/// # Ok::<(), cuvmm_driver::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hints {
    /// As [`Granted`](Self::Granted) with [`Preset::Strict`], and as [`Arenas`](Self::Arenas) with
    /// [`Preset::Measured`].
    ByPreset,
    /// It gets exactly that address if it is free, and another one if not, or if it is among the last 64 GiB that a
    /// process has: its stack is there.
    Granted,
    /// It always gets another address.
    Elsewhere,
    /// As a measured H200 has it: while a context is active, what is smaller than 26 MiB shares regions with its like
    /// and always gets another address; all else is as [`Granted`](Self::Granted).
    Arenas,
    /// The call fails, as some drivers have it.
    Refused(CUresult),
}

impl Default for Machine {
    fn default() -> Self {
        Self::h200()
    }
}

impl Machine {
    /// With those habits.
    #[must_use]
    pub fn preset(self, preset: Preset) -> Self {
        Self { preset, ..self }
    }

    /// With that answer to hints.
    #[must_use]
    pub fn hints(self, hints: Hints) -> Self {
        Self { hints, ..self }
    }

    /// With a driver of that version, as the driver writes it: 12020 is CUDA 12.2.
    #[must_use]
    pub fn driver_version(self, version: i32) -> Self {
        Self { driver_version: CudaVersion(version), ..self }
    }

    /// With that granularity for every kind of memory, or one that depends on it.
    #[must_use]
    pub fn granularity(self, granularity: Granularity) -> Self {
        Self { granularity, ..self }
    }

    /// With so much memory on each device.
    #[must_use]
    pub fn device_memory(mut self, bytes: usize) -> Self {
        for device in &mut self.devices {
            device.total_memory = bytes;
        }
        self
    }

    /// With that many bytes of address space for reservations.
    #[must_use]
    pub fn address_window(self, bytes: u64) -> Self {
        Self { address_window: Some(bytes), ..self }
    }

    /// With fresh device memory that reads as `poison`, or as zero for none.
    #[must_use]
    pub fn poison(self, poison: Option<u8>) -> Self {
        Self { poison, ..self }
    }

    /// With these NUMA nodes.
    #[must_use]
    pub fn numa_nodes(self, nodes: impl Into<Vec<NumaNode>>) -> Self {
        Self { numa_nodes: nodes.into(), ..self }
    }

    /// On a host without NUMA.
    #[must_use]
    pub fn without_numa(mut self) -> Self {
        for device in &mut self.devices {
            device.attributes.insert(CUdevice_attribute::HOST_NUMA_ID.0, -1);
        }
        self.numa_nodes(Vec::new())
    }

    /// With room for so many open files of exportable memory and exported descriptors together. The process's own
    /// limit holds as well.
    #[must_use]
    pub fn open_files(self, most: usize) -> Self {
        Self { open_files: Some(most), ..self }
    }

    /// With calls that take as long as they did there.
    #[must_use]
    pub fn latency(self, latency: Latency) -> Self {
        Self { latency: Some(latency), ..self }
    }

    /// With an IMEX channel.
    #[must_use]
    pub fn with_imex(self) -> Self {
        Self { imex: true, ..self }
    }

    /// With these of its devices alone, numbered anew: what CUDA_VISIBLE_DEVICES does.
    #[must_use]
    pub fn visible(mut self, ordinals: &[usize]) -> Self {
        self.devices = ordinals.iter().filter_map(|&ordinal| self.devices.get(ordinal).cloned()).collect();
        self
    }

    pub(crate) fn device(&self, ordinal: i32) -> Option<&DeviceModel> {
        self.devices.get(usize::try_from(ordinal).ok()?)
    }

    pub(crate) fn ordinal_of(&self, uuid: CUuuid) -> Option<i32> {
        let index = self.devices.iter().position(|device| device.uuid == uuid)?;
        i32::try_from(index).ok()
    }

    /// What reservations are multiples of: a power of two of the host's pages, whatever was asked for.
    pub(crate) fn address_unit(&self) -> usize {
        const MOST: usize = 1 << (usize::BITS - 1);
        self.reservation_unit.checked_next_power_of_two().unwrap_or(MOST).max(4096)
    }

    /// The memory of a node, if there is that node.
    pub(crate) fn node_memory(&self, id: i32) -> Option<usize> {
        if self.numa_nodes.is_empty() {
            return (id == 0).then_some(usize::MAX);
        }
        self.numa_nodes.iter().find(|node| node.id == id).map(|node| node.memory)
    }

    /// The node that host memory without a node of its own is made at: the first one with memory.
    pub(crate) fn first_node(&self) -> i32 {
        self.numa_nodes.iter().find(|node| node.memory > 0).map_or(0, |node| node.id)
    }

    /// Whether `device` reaches the memory of `owner`.
    pub(crate) fn reaches(&self, device: i32, owner: i32) -> bool {
        device == owner
            || match (self.device(device), self.device(owner)) {
                (Some(device), Some(owner)) => device.peers.contains(&owner.uuid),
                _ => false,
            }
    }

    /// An attribute of a device, if the driver's version has it.
    pub(crate) fn attribute(&self, device: &DeviceModel, attribute: u32) -> Option<i32> {
        let known = attribute >= 1 && self.driver_version.0 >= attribute_since(attribute);
        known.then(|| device.attributes.get(&attribute).copied().unwrap_or(0))
    }
}

/// The first CUDA version whose driver knows an attribute.
fn attribute_since(attribute: u32) -> i32 {
    match attribute {
        0..=101 => 2000,
        102..=106 => 10020,
        107..=111 => 11000,
        112 => 11010,
        113..=119 => 11030,
        120..=124 => 11070,
        128 | 133 => 12030,
        125..=129 => 12000,
        132 => 12010,
        130..=139 => 12020,
        140..=142 => 12090,
        143 => 12080,
        144..=147 => 13000,
        148..=153 => 13030,
        154..=162 => 13040,
        _ => i32::MAX,
    }
}
