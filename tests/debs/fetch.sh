#!/bin/sh
# Fetches programs that the tests run from Debian's packages: into a directory, without root, installing nothing.
# Argument: the directory. Programs that the machine has are left out. `bin` in it then has one script a program.
set -eu

mkdir -p "$1"
there=$(cd "$1" && pwd)
# A second make waits, and then finds everything done.
exec 9>"$there/lock"
command -v flock >/dev/null && flock 9
test ! -e "$there/.installed" || exit 0

PATH=$PATH:/usr/sbin:/sbin
# program, package, where it is in the package
programs="chromium chromium usr/lib/chromium/chromium
promtool prometheus usr/bin/promtool
prometheus prometheus usr/bin/prometheus
nginx nginx-light usr/sbin/nginx
haproxy haproxy usr/sbin/haproxy
caddy caddy usr/bin/caddy"
missing=$(echo "$programs" | while read -r program package path; do
  command -v "$program" >/dev/null || echo "$program $package $path"
done)
if [ -z "$missing" ]; then
  touch "$there/.installed"
  exit 0
fi
for needed in apt-get dpkg; do
  command -v "$needed" >/dev/null || {
    echo "there is no $needed here; install $(echo "$missing" | cut -d' ' -f1 | tr '\n' ' ')by other means" >&2
    exit 1
  }
done

# Lists of packages of our own: those of the machine may be missing or out of date, and are root's.
apt() {
  apt-get -qq -o "Dir::State::lists=$there/apt/lists" -o "Dir::Cache=$there/apt/cache" -o Debug::NoLocking=1 \
    -o APT::Sandbox::User= -o Acquire::Languages=none -o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false \
    -o Acquire::Retries=3 "$@"
}
rm -rf "$there/apt" "$there/root" "$there/bin"
mkdir -p "$there/apt/lists/partial" "$there/apt/cache/archives/partial" "$there/apt/packages" "$there/root" "$there/bin"
apt update
# What only a desktop, a graphics card, a service or Prometheus' own pages need; and never another C library than the
# one that runs.
unneeded='^(adduser|adwaita-|at-spi2|dbus|dconf|fonts-glyphicons|gtk-|init-|libc6|libc-bin|libgl1|libglapi|libglx|'
unneeded=$unneeded'libgtk|libjs-|libllvm|librsvg|libsystemd-shared|libpam-|libz3|systemd|xdg-utils|x11-)'
# shellcheck disable=SC2046
wanted=$(apt install --no-install-recommends --print-uris $(echo "$missing" | cut -d' ' -f2) fonts-open-sans fonts-dejavu-core)
names=$(echo "$wanted" | sed -n "s/^'[^']*' \([^_ ]*\)_.*/\1/p" | grep -Ev "$unneeded")
# shellcheck disable=SC2086
(cd "$there/apt/packages" && apt download $names)
for package in "$there"/apt/packages/*.deb; do
  dpkg -x "$package" "$there/root"
done

cat >"$there/fonts.conf" <<END
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig>
<dir>$there/root/usr/share/fonts</dir>
<dir>/usr/share/fonts</dir>
<cachedir>$there/fonts.cache</cachedir>
<match target="pattern"><test name="family"><string>monospace</string></test>
<edit name="family" mode="prepend"><string>DejaVu Sans Mono</string></edit></match>
<match target="pattern"><edit name="family" mode="append_last"><string>Open Sans</string></edit></match>
</fontconfig>
END
libraries=$(find "$there/root" -name '*.so*' ! -path '*/chromium/*' -printf '%h\n' | grep -E '/lib/[^/]*(/nss|/pulseaudio)?$' | sort -u | paste -sd:)
echo "$missing" | while read -r program package path; do
  {
    echo '#!/bin/sh'
    echo "LD_LIBRARY_PATH='$libraries' FONTCONFIG_FILE='$there/fonts.conf' exec '$there/root/$path' \"\$@\""
  } >"$there/bin/$program"
  chmod +x "$there/bin/$program"
done
for program in $(ls "$there/bin"); do
  argument=--version
  if [ "$program" = nginx ] || [ "$program" = haproxy ]; then argument=-v; fi
  if [ "$program" = caddy ]; then argument=version; fi
  "$there/bin/$program" $argument >/dev/null 2>"$there/complaint" || {
    echo "$program does not run: $(head -n 1 "$there/complaint")" >&2
    exit 1
  }
done
rm -rf "$there/apt" "$there/complaint"
touch "$there/.installed"
