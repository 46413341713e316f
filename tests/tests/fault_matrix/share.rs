//! Importing. What exporting leaves is files, and so another suite's matter.

use cuvmm::ipc::{export, import_from};
use cuvmm::{Access, Error, HandleKind, Options, VirtualMemoryBuffer};
use cuvmm_tests::matrix::{Row, Scene, none};
use cuvmm_tests::{Backend, G};

pub(crate) const ROWS: &[Row] = &[
    Row {
        operation: "import",
        path: "three chunks",
        set_up: |backend| exported(backend, Options::new()),
        operate: import,
        exception: none,
    },
    Row {
        operation: "import",
        path: "three chunks, to be read, aligned",
        set_up: |backend| exported(backend, Options::new().own_access(Access::Read).alignment(64 << 20)),
        operate: import,
        exception: none,
    },
    Row {
        operation: "import",
        path: "three chunks, with access for nobody",
        set_up: |backend| exported(backend, Options::new().own_access(Access::None)),
        operate: import,
        exception: none,
    },
];

/// A buffer, a descriptor of it, and a resource to import it by, as has been done once.
fn exported(backend: &Backend, options: Options) -> Scene {
    let buffer = backend.shareable().allocate_with_capacity(G, 8 * G).unwrap();
    let mut scene = Scene::of(buffer.grow_into(3 * G).unwrap().grow_into(4 * G).unwrap());
    let other = backend.resource_with(options.handle_kind(HandleKind::PosixFd));
    let descriptor = export(scene.buffer()).unwrap();
    import_from(&other, &descriptor).unwrap().close().unwrap();
    scene.other = Some(other);
    scene.descriptor = Some(descriptor);
    scene
}

fn import(scene: &mut Scene) -> Result<Option<VirtualMemoryBuffer>, Error> {
    let (other, descriptor) = (scene.other.as_ref().expect("a resource"), scene.descriptor.as_ref());
    Ok(Some(import_from(other, descriptor.expect("a descriptor"))?))
}
