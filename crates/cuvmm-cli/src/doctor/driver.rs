//! What the driver is, what it lacks, and what it lets this process have.

use std::fs;
use std::path::Path;

use cuvmm::driver::sys::CUmemLocation;
use cuvmm::handles::{Error, Reservation};
use cuvmm::{CUresult, Call, LoadError};

use super::cure;
use super::host::Host;
use super::probe::{Found, Probe, plain};
use super::report::{Answer, Culprit, Row, Section, bytes, counted};

/// Where the search for the longest reservation begins: more than x86-64 has addresses for.
const MOST: usize = 1 << 47;

/// A driver that runs. `library` is none for the simulator.
pub(super) fn section(probe: &Probe<'_>, library: Option<&Host>) -> Section {
    let version = probe.driver.version().to_string();
    let mut rows = vec![Row::fact("cuda", "CUDA version", version.clone()).value(version)];
    rows.extend(library.map(library_row));
    rows.extend(library.and_then(Host::kernel_driver_row));
    rows.push(symbols(probe));
    let devices = probe.driver.device_count();
    rows.push(Row::fact("devices", "devices", devices.to_string()).value(devices));
    rows.push(reservation(probe));
    Section { id: "driver".into(), title: "driver".into(), rows }
}

/// A driver that can't be loaded, or does not start.
pub(super) fn failed(error: &LoadError, host: &Host) -> Section {
    let culprit = match error {
        LoadError::Init(error) => Culprit { call: error.call(), code: error.code() },
        LoadError::MissingSymbol { symbol, .. } => Culprit { call: Some(*symbol), code: None },
        _ => Culprit::default(),
    };
    let mut detail = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        detail.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    let mut rows = Vec::new();
    match error {
        LoadError::LibraryNotFound { .. } => {
            detail.push_str("; looked for where the dynamic loader looks (LD_LIBRARY_PATH, ld.so.cache, the system's folders) and in /usr/lib/wsl/lib");
        }
        _ => rows.push(library_row(host)),
    }
    rows.push(Row::no("start", "loaded and started", culprit, detail).cure(cure::of_load(error)));
    rows.extend(host.kernel_driver_row());
    Section { id: "driver".into(), title: "driver".into(), rows }
}

/// The file that the library was loaded from.
fn library_row(host: &Host) -> Row {
    match &host.library {
        None => Row::fact("library", "library", "not told by /proc/self/maps"),
        Some(path) => {
            let row = Row::fact("library", "library", path.clone()).value(path.clone());
            let version = path.rsplit_once(".so.").map(|(_, version)| version);
            match (version, host.kernel_driver.as_deref()) {
                (Some(version), Some(kernel)) if version.contains('.') && version != kernel => Row {
                    answer: Answer::Warning,
                    cure: Some("the library and the kernel driver are of two versions: restart after an update, or mind that it is a forward-compatibility library".to_owned()),
                    ..row
                },
                _ => row,
            }
        }
    }
}

/// The library, as this process has it mapped.
pub(super) fn loaded_library(root: &Path) -> Option<String> {
    let maps = fs::read_to_string(root.join("proc/self/maps")).ok()?;
    let paths = maps.lines().filter_map(|line| line.split_once('/').map(|(_, path)| format!("/{path}")));
    paths.into_iter().find(|path| path.rsplit('/').next().is_some_and(|name| name.starts_with("libcuda.so")))
}

/// The calls that the driver is too old for.
fn symbols(probe: &Probe<'_>) -> Row {
    let missing: Vec<&str> =
        Call::ALL.iter().filter(|call| !probe.driver.raw().provides(**call)).map(|call| call.name()).collect();
    let row = if missing.is_empty() {
        Row::fact("missing_calls", "calls", format!("all {} are there", Call::ALL.len()))
    } else {
        let detail = format!("{} of {} missing: {}", missing.len(), Call::ALL.len(), missing.join(", "));
        Row::warning(
            "missing_calls",
            "calls",
            detail,
            "what needs them answers that it is not supported; a newer driver may have them",
        )
    };
    row.value(missing)
}

/// The longest single reservation that can be had, by halving.
fn reservation(probe: &Probe<'_>) -> Row {
    probe.ask("reservation", "longest reservation", || {
        let mut size = MOST;
        loop {
            match Reservation::reserve(probe.driver, Reservation::GRANULARITY.exact(size)?, 0) {
                Ok(range) => {
                    range.close()?;
                    return Ok(Found::new(bytes(size as u64)).value(size));
                }
                Err(Error::Reserve { error, .. })
                    if error.code() == Some(CUresult::OUT_OF_MEMORY) && size > Reservation::GRANULARITY.bytes() =>
                {
                    size /= 2;
                }
                Err(error) => return Err(error.into()),
            }
        }
    })
}

/// Host memory, as the driver makes it: granted to the host and to every device.
pub(super) fn host_memory(probe: &Probe<'_>, nodes: &[i32]) -> Section {
    let devices: Vec<CUmemLocation> = probe.driver.devices().iter().map(|device| device.location()).collect();
    let try_out = |id: &str, title: &str, location: CUmemLocation| {
        probe.try_out(id, title, || {
            let all: Vec<CUmemLocation> = [location].into_iter().chain(devices.iter().copied()).collect();
            let size = probe.round_trip(&plain(location), &all)?;
            let whom = counted(devices.len(), "device");
            Ok(Found::new(format!("{} made, mapped, granted to the host and {whom}, given back", bytes(size as u64))))
        })
    };
    let mut rows = vec![try_out("host", "any node", CUmemLocation::host())];
    for &node in nodes {
        rows.push(try_out(&format!("host_node_{node}"), &format!("NUMA node {node}"), CUmemLocation::host_numa(node)));
    }
    rows.push(probe.granularity("host", "any node", &plain(CUmemLocation::host())));
    for &node in nodes {
        let location = plain(CUmemLocation::host_numa(node));
        rows.push(probe.granularity(&format!("host_node_{node}"), &format!("node {node}"), &location));
    }
    Section { id: "host_memory".into(), title: "host memory for devices".into(), rows }
}
