//! What one device can do.

use std::os::fd::AsFd;

use cuvmm::driver::sys::{CUdevice_P2PAttribute, CUdevice_attribute, CUmemAllocationHandleType, CUmemAllocationProp};
use cuvmm::handles::Allocation;
use cuvmm::{Call, Device, Options, VirtualMemoryResource};
use serde_json::json;

use super::probe::{Found, Outcome, Probe, Refused, plain};
use super::report::{self, DEVICE, MEMORY, Row, Section};

/// How much is written and read back at most.
const PIECE: usize = 64 << 10;

pub(super) fn section(probe: &Probe<'_>, device: &Device) -> Section {
    let mut rows = facts(probe, device);
    rows.extend(probes(probe, device));
    rows.extend(probe.driver.devices().iter().filter(|peer| *peer != device).map(|peer| reach(probe, device, peer)));
    rows.extend(granularities(probe, device));
    let name = rows.iter().find(|row| row.id == "name").and_then(|row| row.value.as_str());
    let title = format!("device {}{}", device.ordinal(), name.map(|name| format!(": {name}")).unwrap_or_default());
    Section { id: format!("{DEVICE}{}", device.ordinal()), title, rows }
}

fn facts(probe: &Probe<'_>, device: &Device) -> Vec<Row> {
    let text = |text: String| Found::new(text.clone()).value(text);
    vec![
        probe.ask("name", "name", || Ok(text(device.name()?))),
        probe.ask("uuid", "identity", || Ok(text(device.uuid()?.to_string()))),
        probe.ask("pci", "PCI address", || Ok(text(device.pci_bus_id()?))),
        probe.ask("compute_capability", "compute capability", || Ok(text(device.compute_capability()?.to_string()))),
        probe.ask("total_memory", "memory in all", || {
            let bytes = device.total_memory()? as u64;
            Ok(Found::new(format!("{:.1} GiB", bytes as f64 / (1_u64 << 30) as f64)).value(bytes))
        }),
        probe.ask("host_node", "nearest NUMA node", || {
            let node = device.host_numa_id()?;
            Ok(Found::new(node.map_or("none, or not told".to_owned(), |node| node.to_string())).value(node))
        }),
        sharing(probe, device),
    ]
}

/// Whether others have a part of it, it is a part itself, or nobody may use it.
fn sharing(probe: &Probe<'_>, device: &Device) -> Row {
    /// CU_DEVICE_ATTRIBUTE_MPS_ENABLED, since CUDA 12.3.
    const MPS_ENABLED: CUdevice_attribute = CUdevice_attribute(133);
    probe.ask("sharing", "parts and sharers", || {
        let instance = device.name()?.contains(" MIG ");
        let mps = device.attribute(MPS_ENABLED)?.map(|enabled| enabled != 0);
        let integrated = device.attribute(CUdevice_attribute::INTEGRATED)?.is_some_and(|integrated| integrated != 0);
        let mode = device.attribute(CUdevice_attribute::COMPUTE_MODE)?;
        let mut words = Vec::new();
        words.extend(instance.then_some("a MIG instance: no peers"));
        words.extend(mps.and_then(|mps| mps.then_some("under MPS: memory may be limited for each client")));
        words.extend(integrated.then_some("integrated: no RDMA and no dma-buf"));
        words.extend(mode.and_then(compute_mode));
        if words.is_empty() {
            words.push(if mps.is_some() { "a whole device, no MPS" } else { "a whole device; MPS is not told" });
        }
        let detail = words.join("; ");
        let value = json!({ "mig": instance, "mps": mps, "integrated": integrated, "compute_mode": mode });
        Ok(Found::new(detail).value(value))
    })
}

/// A compute mode that keeps processes out.
fn compute_mode(mode: i32) -> Option<&'static str> {
    match mode {
        0 => None,
        2 => Some("compute mode `prohibited`: no process may have a context"),
        3 => Some("compute mode `exclusive process`: one process at a time may have a context"),
        _ => Some("a compute mode that is not known"),
    }
}

fn probes(probe: &Probe<'_>, device: &Device) -> Vec<Row> {
    vec![
        probe.try_out(MEMORY, "memory", || {
            let size = probe.round_trip(&plain(device.location()), &[device.location()])?;
            Ok(Found::new(format!("{} made, mapped, granted, given back", report::bytes(size as u64))))
        }),
        probe.try_out("copies", "write and read back", || copies(device)),
        probe.try_out("posix_fd", "shared as posix fd", || posix_fd(probe, device)),
        probe.try_out("fabric", "shared as fabric handle", || fabric(probe, device)),
        probe.try_out("rdma", "GPUDirect RDMA flag", || {
            let mut properties = plain(device.location());
            properties.alloc_flags.gpu_direct_rdma_capable = 1;
            flagged(probe, device, &properties, CUdevice_attribute::GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED)
        }),
        probe.try_out("compression", "compression", || {
            let mut properties = plain(device.location());
            properties.alloc_flags.compression_type = 1;
            flagged(probe, device, &properties, CUdevice_attribute::GENERIC_COMPRESSION_SUPPORTED)
        }),
        probe.try_out("dma_buf", "dma-buf", || dma_buf(probe, device)),
    ]
}

/// Writes to fresh memory by way of the device, and reads it back. That needs a context: it takes a share of the primary
/// one, and gives it back.
fn copies(device: &Device) -> Outcome {
    let buffer = VirtualMemoryResource::new(device, Options::new())?.allocate(1)?;
    let written: Vec<u8> = (0..buffer.size().min(PIECE)).map(|index| (index % 251) as u8).collect();
    let mut read = vec![0xff; written.len()];
    buffer.copy_from_host(0, &written)?;
    buffer.copy_to_host(0, &mut read)?;
    buffer.close()?;
    match written.iter().zip(&read).position(|(written, read)| written != read) {
        None => Ok(Found::new(format!("{}, in the primary context", report::bytes(read.len() as u64)))),
        Some(index) => Err(Refused::Wrong(Call::cuMemcpyDtoHAsync, format!("byte {index} is not what was written"))),
    }
}

/// Makes memory, exports it, maps what is imported, and gives all back.
fn posix_fd(probe: &Probe<'_>, device: &Device) -> Outcome {
    let kind = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;
    let memory = probe.make(&CUmemAllocationProp::pinned(device.location(), kind))?;
    let descriptor = memory.export_posix_fd()?;
    let size = memory.granularity().exact(memory.size())?;
    let imported = Allocation::import_posix_fd(device.driver(), descriptor.as_fd(), size)?;
    drop(descriptor);
    probe.map(imported, &[device.location()])?.close()?;
    memory.close()?;
    let attribute = CUdevice_attribute::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED;
    Ok(Found::new(format!("made, exported, imported, mapped, given back{}", promise(device, attribute)?)))
}

/// As [`posix_fd`], for other hosts. The attribute isn't asked: without an IMEX channel it promises what can't be had.
fn fabric(probe: &Probe<'_>, device: &Device) -> Outcome {
    let kind = CUmemAllocationHandleType::FABRIC;
    let memory = probe.make(&CUmemAllocationProp::pinned(device.location(), kind))?;
    let size = memory.granularity().exact(memory.size())?;
    let imported = Allocation::import_fabric(device.driver(), &memory.export_fabric()?, size)?;
    probe.map(imported, &[device.location()])?.close()?;
    memory.close()?;
    Ok(Found::new("made, exported, imported, mapped, given back"))
}

/// Memory that was made with a flag keeps it, and works as other memory does.
fn flagged(
    probe: &Probe<'_>,
    device: &Device,
    properties: &CUmemAllocationProp,
    attribute: CUdevice_attribute,
) -> Outcome {
    let memory = probe.make(properties)?;
    let call = Call::cuMemGetAllocationPropertiesFromHandle;
    if memory.properties()?.alloc_flags != properties.alloc_flags {
        return Err(Refused::Wrong(call, "the flag was dropped".to_owned()));
    }
    probe.map(memory, &[device.location()])?.close()?;
    Ok(Found::new(format!("made, kept, mapped, given back{}", promise(device, attribute)?)))
}

/// Exports memory to other drivers. That needs a context, as a write does.
fn dma_buf(probe: &Probe<'_>, device: &Device) -> Outcome {
    let mapping = probe.map(probe.make(&plain(device.location()))?, &[device.location()])?;
    drop(mapping.export_dma_buf()?);
    mapping.close()?;
    Ok(Found::new(format!(
        "made, mapped, exported, given back{}",
        promise(device, CUdevice_attribute::DMA_BUF_SUPPORTED)?
    )))
}

/// What there is to say where the attribute denies what was just done.
fn promise(device: &Device, attribute: CUdevice_attribute) -> Result<&'static str, cuvmm::driver::Error> {
    let promised = device.attribute(attribute)?.is_some_and(|value| value != 0);
    Ok(if promised { "" } else { ", although the attribute says no" })
}

/// Whether a device reaches another one's memory: what the attributes say, and a real grant.
fn reach(probe: &Probe<'_>, device: &Device, peer: &Device) -> Row {
    let title = format!("memory of device {}", peer.ordinal());
    probe.try_out(&format!("peer_{}", peer.ordinal()), &title, || {
        let told = device.can_access_peer(peer)?;
        let rank = device.p2p_attribute(CUdevice_P2PAttribute::PERFORMANCE_RANK, peer)?;
        let atomics = device.p2p_attribute(CUdevice_P2PAttribute::NATIVE_ATOMIC_SUPPORTED, peer)? != 0;
        probe.round_trip(&plain(peer.location()), &[device.location()])?;
        let detail = format!(
            "mapped and granted; rank {rank}, {}{}",
            if atomics { "with atomics" } else { "no atomics" },
            if told { "" } else { "; cuDeviceCanAccessPeer says no" },
        );
        let value = json!({ "can_access_peer": told, "performance_rank": rank, "atomics": atomics });
        Ok(Found::new(detail).value(value))
    })
}

fn granularities(probe: &Probe<'_>, device: &Device) -> Vec<Row> {
    let location = device.location();
    let of = |kind| CUmemAllocationProp::pinned(location, kind);
    let (mut rdma, mut compression) = (plain(location), plain(location));
    rdma.alloc_flags.gpu_direct_rdma_capable = 1;
    compression.alloc_flags.compression_type = 1;
    vec![
        probe.granularity("plain", "plain", &plain(location)),
        probe.granularity("posix_fd", "posix fd", &of(CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR)),
        probe.granularity("fabric", "fabric", &of(CUmemAllocationHandleType::FABRIC)),
        probe.granularity("rdma", "RDMA flag", &rdma),
        probe.granularity("compression", "compression", &compression),
    ]
}
