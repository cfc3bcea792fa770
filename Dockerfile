# One image for both programs: `gym-servers` in the pods of a stack, `gym-operator` in its own deployment.
#
# Where no registry is at hand, BASE_IMAGE is a Debian tree made by debootstrap, and requirements/wheels holds the
# dependencies; without that folder they come from the package index. Either way their hashes are checked.
ARG BASE_IMAGE=debian:trixie-slim

FROM ${BASE_IMAGE} AS dependencies
# served: with what the policy server of a model that vLLM serves needs as well; vllm: with vLLM itself for a CPU.
ARG REQUIREMENTS=runtime
# The name for the user id is what `getpass.getuser()` and shells look for; the id is what Kubernetes checks.
RUN if ! python3 -c 'import ensurepip, venv' 2>/dev/null; then \
      apt-get update \
      && apt-get install --yes --no-install-recommends python3 python3-venv ca-certificates \
      && rm -rf /var/lib/apt/lists/*; \
    fi \
    && echo 'gym:x:65532:65532:gym:/tmp:/usr/sbin/nologin' >> /etc/passwd \
    && echo 'gym:x:65532:' >> /etc/group
# Copied although it is mounted below as well: not every builder notices that a mounted file has changed.
COPY requirements/${REQUIREMENTS}.txt /opt/gym/requirements.txt
# The lock is all that is needed. pip lives in an environment of its own and stays out of the image. Bytecode is compiled without a check of the
# source's time: a server that replaces a dead one should not spend its first moments looking at 2000 files.
RUN --mount=type=bind,source=requirements,target=/requirements \
    python3 -m venv /tmp/pip \
    && python3 -m venv --without-pip /opt/gym \
    && if [ -d /requirements/wheels ]; then set -- --no-index --find-links=/requirements/wheels; fi \
    && /tmp/pip/bin/pip --python /opt/gym/bin/python install --no-cache-dir --no-compile --no-deps --require-hashes "$@" \
         --requirement /opt/gym/requirements.txt \
    && rm -rf /tmp/pip \
    && python3 -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/gym/lib \
    && echo /opt/gym/app > "$(echo /opt/gym/lib/python3*/site-packages)/gym.pth"
LABEL org.opencontainers.image.title="gym-operator" \
      org.opencontainers.image.licenses="Apache-2.0"
# Nothing is written beside the code: the root file system may be read-only, with /tmp as the only writable place.
ENV PATH=/opt/gym/app/bin:/opt/gym/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
CMD ["gym-servers", "--help"]

FROM dependencies AS application
WORKDIR /opt/gym/app
COPY pyproject.toml operator/ servers/ ./
# What an installer would write: the two programs, and the version where `importlib.metadata` finds it.
RUN version="$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)" \
    && info="gym_operator-${version}.dist-info" \
    && mkdir bin "${info}" \
    && printf 'Metadata-Version: 2.1\nName: gym-operator\nVersion: %s\n' "${version}" > "${info}/METADATA" \
    && for program in gym_operator gym_servers; do \
         file="bin/$(echo "${program}" | tr _ -)" \
         && printf '#!/opt/gym/bin/python\nimport sys\n\nfrom %s.__main__ import main\n\nsys.exit(main())\n' \
              "${program}" > "${file}" \
         && chmod 755 "${file}"; \
       done \
    && rm pyproject.toml \
    && python3 -m compileall -q --invalidation-mode unchecked-hash .

FROM dependencies
USER 65532:65532
COPY --from=application /opt/gym/app /opt/gym/app
