#!/bin/sh
# Installs into a virtual environment, which it creates if needed:
#
#     infra/environment.sh FOLDER ARGUMENTS… [-- ARGUMENTS…]
#
# Each group of arguments is one installation by uv, which is several times as fast as pip. Where there is no wheel of uv, pip takes its place.
# uv itself has an environment of its own in build/, and its cache serves all environments. PYTHON names the interpreter.
set -eu
folder=$1
shift
python=${PYTHON:-python3}
tool=build/uv-env
# Folders of wheels that pip searches on this machine: uv has the same list, with commas.
: "${UV_FIND_LINKS:=$(printf %s "${PIP_FIND_LINKS:-}" | tr ' ' ',')}"
export UV_FIND_LINKS

if [ ! -x "$tool/bin/uv" ]; then
    "$python" -m venv "$tool"
    "$tool/bin/python" -m pip install --quiet --disable-pip-version-check --only-binary :all: -r requirements/uv.txt ||
        echo "no wheel of uv for this platform: pip installs instead" >&2
fi
install() {
    if [ -x "$tool/bin/uv" ]; then
        "$tool/bin/uv" pip install --quiet --python "$folder/bin/python" "$@"
    else
        "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
    fi
}

# An interpreter that was removed leaves a broken link.
[ -x "$folder/bin/python" ] || "$python" -m venv --clear "$folder"
group=
for argument do
    if [ "$argument" = -- ]; then
        # shellcheck disable=SC2086 # the arguments have no spaces
        install $group
        group=
    else
        group="$group $argument"
    fi
done
# shellcheck disable=SC2086
install $group
