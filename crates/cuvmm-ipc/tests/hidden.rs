//! Memory of a device that the importing process does not see: refused unless it is asked for, and then imported where
//! the hardware allows it. Whatever else the descriptor says, the driver's word is to agree with it.
#![allow(clippy::unwrap_used, clippy::panic, reason = "what a test did not expect ends it, in its helpers too")]

#[path = "support/simulated.rs"]
mod simulated;
mod support;

use cuvmm_driver::Call;
use cuvmm_driver::sys::{CUmemLocation, CUresult, CUuuid};
use cuvmm_ipc::{BufferDescriptor, Error, Importer, Limits, Location, export, send};
use cuvmm_resource::{HandleKind, Options, VirtualMemoryBuffer, VirtualMemoryResource};
use cuvmm_sim::{Machine, Preset};
use simulated::{Bench, assert_reads, grown, shareable, write};
use support::{OpenFiles, pair, soon};

/// A process that sees the first of two devices, where hidden memory can be imported or not, and one that sees both.
fn processes(preset: Preset) -> (Bench, Bench) {
    (Bench::new(Machine::h200_pair().visible(&[0]).preset(preset)), Bench::new(Machine::h200_pair()))
}

/// A buffer of the second device, of which the first process does not know.
fn of_the_second(exporter: &Bench) -> VirtualMemoryBuffer {
    let buffer = grown(&shareable(&exporter.driver, 1), 3);
    write(&buffer, 7);
    buffer
}

fn told(descriptor: &BufferDescriptor, location: Option<Location>) -> BufferDescriptor {
    let (mut metadata, handles) = descriptor.try_clone().unwrap().into_parts().unwrap();
    metadata.location = location;
    BufferDescriptor::new(metadata, handles).unwrap()
}

#[test]
fn it_is_refused_by_default_before_any_call_and_imported_where_it_is_asked_for() {
    let files = OpenFiles::watch();
    let (bench, exporter) = processes(Preset::Measured);
    let resource = bench.shareable();
    let buffer = of_the_second(&exporter);
    let descriptor = export(&buffer).unwrap();
    let uuid = exporter.driver.device(1).unwrap().uuid().unwrap();
    // Whatever the first import has to ask is known.
    drop(Importer::new(&resource).import(export(&resource.allocate(1).unwrap()).unwrap()).unwrap());
    bench.simulator.clear_calls();
    let error = Importer::new(&resource).import_from(&descriptor).unwrap_err();
    assert!(matches!(error, Error::HiddenDevice { uuid: Some(told) } if told == uuid), "{error:?}");
    assert_eq!(bench.simulator.calls(), []);

    let importer = Importer::new(&resource).allow_hidden_device();
    let imported = importer.import_from(&descriptor).unwrap();
    assert_reads(&imported, 7);
    write(&imported, 8);
    assert_reads(&buffer, 8);
    let sent = descriptor.try_clone().unwrap();
    let (ours, theirs) = pair();
    let sender = std::thread::spawn(move || send(theirs, &sent, soon()));
    assert_reads(&importer.receive(&ours, &Limits::default(), soon()).unwrap(), 8);
    sender.join().unwrap().unwrap();
    // Memory of one's own is imported by it as ever.
    drop(importer.import(export(&resource.allocate(1).unwrap()).unwrap()).unwrap());

    let grown = imported.grow(imported.size() + 1).unwrap();
    drop((buffer, exporter, descriptor, imported, ours));
    assert_eq!(bench.simulator.violations(), []);
    drop((grown, resource));
    bench.assert_live(&Default::default());
    drop(bench);
    files.assert_unchanged();
}

#[test]
fn what_the_driver_says_must_be_what_was_told() {
    let _files = OpenFiles::watch();
    let (bench, exporter) = processes(Preset::Measured);
    let resource = bench.shareable();
    let hidden = export(&of_the_second(&exporter)).unwrap();
    let own = export(&shareable(&bench.driver, 0).allocate(1).unwrap()).unwrap();
    let ours = own.location();
    let unknown = Some(Location::Device { uuid: CUuuid { bytes: [9; 16] } });
    let (visible, invisible) = (CUmemLocation::device(0), CUmemLocation::device(-2));
    let import = |descriptor: &BufferDescriptor, location| {
        Importer::new(&resource).allow_hidden_device().import(told(descriptor, location))
    };
    for (descriptor, location) in [(&hidden, hidden.location()), (&hidden, unknown), (&hidden, None), (&own, None)] {
        drop(import(descriptor, location).unwrap());
    }
    let lies = |descriptor, location, expected, found| {
        let error = import(descriptor, location).unwrap_err();
        let said =
            matches!(error, Error::OtherMemory { chunk: 0, found: f, expected: e } if (e, f) == (expected, found));
        assert!(said, "{error:?}");
    };
    lies(&hidden, ours, visible, invisible);
    lies(&own, unknown, invisible, visible);
    let error = import(&own, Some(Location::HostNuma { node: 0 })).unwrap_err();
    assert!(matches!(error, Error::WrongLocation { .. }), "{error:?}");
    // Nothing was told, and nothing was asked for.
    let error = Importer::new(&resource).import(told(&hidden, None)).unwrap_err();
    assert!(matches!(error, Error::HiddenDevice { uuid: None }), "{error:?}");
}

#[test]
fn another_device_that_is_visible_is_refused_all_the_same() {
    let _files = OpenFiles::watch();
    let bench = Bench::new(Machine::h200_pair().preset(Preset::Measured));
    let descriptor = export(&of_the_second(&bench)).unwrap();
    let resource = bench.shareable();
    let error = Importer::new(&resource).allow_hidden_device().import_from(&descriptor).unwrap_err();
    assert!(matches!(error, Error::WrongLocation { .. }), "{error:?}");
    // Nor is the host's memory a device's that is hidden.
    let options = Options::new().location(cuvmm_resource::Location::HostNuma(0)).handle_kind(HandleKind::PosixFd);
    let host = VirtualMemoryResource::new(&bench.driver.device(0).unwrap(), options).unwrap();
    let unknown = told(&descriptor, Some(Location::Device { uuid: CUuuid { bytes: [9; 16] } }));
    let error = Importer::new(&host).allow_hidden_device().import(unknown).unwrap_err();
    assert!(matches!(error, Error::WrongLocation { .. }), "{error:?}");
}

#[test]
fn hardware_that_does_not_allow_it_refuses_and_nothing_is_left() {
    let files = OpenFiles::watch();
    let (bench, exporter) = processes(Preset::Strict);
    let resource = bench.shareable();
    let descriptor = export(&of_the_second(&exporter)).unwrap();
    let error = Importer::new(&resource).allow_hidden_device().import(descriptor).unwrap_err();
    let refused = (Some(Call::cuMemImportFromShareableHandle), Some(CUresult::INVALID_DEVICE));
    assert_eq!((error.call(), error.code()), refused, "{error}");
    drop(resource);
    bench.assert_live(&Default::default());
    drop((bench, exporter));
    files.assert_unchanged();
}
