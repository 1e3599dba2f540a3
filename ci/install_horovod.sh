#!/usr/bin/env bash
# Installs Horovod 0.28.1 into a Python that has torch, TensorFlow or both: ci/install_horovod.sh PYTHON
#
# PyPI has Horovod as source only, older than today's frameworks: two edits make it build with them, with Gloo and without
# MPI. The wheel (4 to 8 minutes on two cores) fits exactly these versions of Python and the frameworks; it is kept under
# ${XDG_CACHE_HOME:-~/.cache}/unidist-ci/wheels and used again.
set -euo pipefail

VERSION=0.28.1
python=${1:?usage: ci/install_horovod.sh PYTHON}
constraints=$(cd "$(dirname "$0")" && pwd)/constraints.txt
cache=${XDG_CACHE_HOME:-$HOME/.cache}/unidist-ci/wheels

pip() { "$python" -m pip --quiet --disable-pip-version-check "$@"; }

# The version of the first distribution that is installed, "none" where none is.
version() {
    "$python" - "$@" <<'PYTHON'
import sys
from importlib.metadata import PackageNotFoundError, version

for name in sys.argv[1:]:
    try:
        print(version(name))
        break
    except PackageNotFoundError:
        continue
else:
    print("none")
PYTHON
}

# A CMake command or a compiler that the machine lacks: pip for the first, apt for the second, where apt is.
build_tools() {
    pip install --constraint "$constraints" setuptools wheel packaging cloudpickle psutil pyyaml cffi
    command -v cmake >/dev/null || "$python" -m cmake --version >/dev/null 2>&1 || pip install "cmake<4"
    if ! command -v g++ >/dev/null || ! command -v make >/dev/null; then
        local root=""
        [ "$(id -u)" = 0 ] || root=sudo
        command -v apt-get >/dev/null || { echo "horovod: g++ and make are needed to build it" >&2; exit 1; }
        $root apt-get update -qq && $root apt-get install -y -qq --no-install-recommends g++ make
    fi
}

# Replaces in files, and fails where a file has nothing to replace: then the source is not the one these edits are for.
edit() {
    local pattern=$1 replacement=$2 file
    shift 2
    for file in "$@"; do
        grep -q "$pattern" "$file" || { echo "horovod: no '$pattern' in $file" >&2; exit 1; }
        sed -i "s/$pattern/$replacement/" "$file"
    done
}

build() {
    local work source
    work=$(mktemp -d)
    trap 'rm -rf "$work"' RETURN
    build_tools
    (cd "$work" && pip download --no-deps --no-build-isolation --no-binary horovod "horovod==$VERSION" && tar xzf horovod-*.tar.gz)
    source=$work/horovod-$VERSION
    # Headers of torch since 2.1 need C++17.
    edit 'set(CMAKE_CXX_STANDARD 14)' 'set(CMAKE_CXX_STANDARD 17)' "$source/CMakeLists.txt" "$source/horovod/torch/CMakeLists.txt"
    # TensorFlow's wheel lacks a header of it. It serves Horovod's operations under jit_compile only.
    edit '.*xla_mpi_ops\.cc.*' '' "$source/horovod/tensorflow/CMakeLists.txt"
    (
        cd "$source"
        export HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITHOUT_NVTX=1
        export CMAKE_POLICY_VERSION_MINIMUM=3.5 MAKEFLAGS="${MAKEFLAGS:--j$(nproc)}"
        # The tools of the Python that builds, where the machine has none.
        PATH=$PATH:$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
        if [ "$torch" = none ]; then export HOROVOD_WITHOUT_PYTORCH=1; else export HOROVOD_WITH_PYTORCH=1; fi
        if [ "$tensorflow" = none ]; then export HOROVOD_WITHOUT_TENSORFLOW=1; else export HOROVOD_WITH_TENSORFLOW=1; fi
        pip wheel --no-build-isolation --no-deps --wheel-dir "$work/wheel" .
    )
    mkdir -p "$home"
    mv "$work"/wheel/horovod-*.whl "$home/"
}

torch=$(version torch)
tensorflow=$(version tensorflow-cpu tensorflow)
if [ "$torch$tensorflow" = nonenone ]; then
    echo "horovod: $python has neither torch nor TensorFlow; install the one to use first" >&2
    exit 1
fi
tag=$("$python" -c 'import platform, sys; print(f"{sys.implementation.cache_tag}-{platform.machine()}")')
home=$cache/horovod-$VERSION-$tag-torch-$torch-tensorflow-$tensorflow
mkdir -p "$cache"
exec 8>"$cache/lock"
flock 8
if ! compgen -G "$home/horovod-*.whl" >/dev/null; then
    echo "horovod: building $home" >&2
    build
fi
pip install --constraint "$constraints" --force-reinstall --no-deps "$home"/horovod-*.whl
pip install --constraint "$constraints" cloudpickle psutil pyyaml packaging cffi
"$python" -c 'import horovod.runner' && echo "horovod: $(version horovod) in $python, torch $torch, TensorFlow $tensorflow"
